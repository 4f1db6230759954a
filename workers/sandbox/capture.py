"""A stream's output in bounded memory: its head, its tail, and how much was cut between them.

Filled by whatever runs a command, local or remote; read once the command has ended.
"""

from __future__ import annotations


class BoundedCapture:
    """Keeps the head and the tail of a stream in a fixed amount of memory."""

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
        """Return what was kept, with a notice in the place of what was not."""
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        if not self.dropped:
            return self.kept().decode(errors="replace")
        return f"{head}\n[... {self.dropped} bytes of output cut ...]\n{tail}"
