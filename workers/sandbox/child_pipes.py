"""The pipes of a child process, read and written by the event loop.

Used by `child_process`. Output is kept in bounded memory. Must not: block, or know the child.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from typing import Any, BinaryIO

from workers.sandbox.capture import BoundedCapture

_CHUNK = 256 * 1024
#: Scripts use single digits for descriptors of their own.
_FIRST_STATUS_FD = 10


class PipeReader:
    """Reads one of a child's pipes into a capture, until its last writer closes it."""

    def __init__(self, file: Any, limit: int) -> None:
        self.capture = BoundedCapture(limit)
        self.closed = asyncio.Event()
        self._file = file
        self._loop = asyncio.get_running_loop()
        os.set_blocking(file.fileno(), False)
        self._loop.add_reader(file.fileno(), self._read)

    def close(self) -> None:
        """Stop reading; a writer that goes on gets SIGPIPE."""
        if not self._file.closed:
            self._loop.remove_reader(self._file.fileno())
            self._file.close()
            self.closed.set()

    def _read(self) -> None:
        data = self._file.read(_CHUNK)
        if data is None:  # another callback has emptied the pipe
            return
        self.capture.add(data)
        if not data or self.capture.is_flooded:
            self.close()


class PipeWriter:
    """Writes a child's input into its pipe and closes it."""

    def __init__(self, file: Any, data: bytes) -> None:
        self._file = file
        self._pending = memoryview(data)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(file.fileno(), False)
        self._loop.add_writer(file.fileno(), self._write)

    def close(self) -> None:
        """Stop writing."""
        if not self._file.closed:
            self._loop.remove_writer(self._file.fileno())
            self._file.close()

    def _write(self) -> None:
        try:
            written = self._file.write(self._pending[:_CHUNK])
        except BrokenPipeError:  # a command need not read its input
            written = len(self._pending)
        self._pending = self._pending[written or 0 :]
        if not self._pending:
            self.close()


def make_status_pipe() -> tuple[BinaryIO, int]:
    """Return the read end of a pipe, and a write end whose number no script uses."""
    read_fd, write_fd = os.pipe()
    try:
        moved = fcntl.fcntl(write_fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_STATUS_FD)
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return open(read_fd, "rb", buffering=0), moved
