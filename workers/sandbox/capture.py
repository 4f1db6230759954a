"""A stream's output in bounded memory: its head, its tail, and how much was cut between them.

Filled while a command runs, local or in a container; read once the command has ended.
"""

from __future__ import annotations

#: Output beyond this is not read at all.
MOST_READ_BYTES = 64 * 1024**2


class BoundedCapture:
    """Keeps the head and the tail of a stream in at most `limit` bytes of memory."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    @property
    def dropped(self) -> int:
        """Bytes between head and tail that were not kept."""
        return self.total - len(self._head) - len(self._tail)

    @property
    def is_flooded(self) -> bool:
        """Whether so much was written that no more is to be read."""
        return self.total >= MOST_READ_BYTES

    @property
    def is_truncated(self) -> bool:
        """Whether a part of the stream is missing."""
        return bool(self.dropped) or self.is_flooded

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    def kept(self) -> bytes:
        """Return the bytes that were kept."""
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """Return the kept bytes as text, with a notice where bytes were cut."""
        if not self.dropped:
            return self.kept().decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n[... {self.dropped} bytes of output cut ...]\n{tail}"
