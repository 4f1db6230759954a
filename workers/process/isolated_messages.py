"""The messages between a worker and the process of an isolated attempt, over a socket.

A frame is one byte for its kind, a length, and the data: JSON, a frame of completions, or nothing.
Must not: be used between machines, or between different versions.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.settings import Settings

HEAD = struct.Struct(">cI")

# From the worker.
REQUEST = b"R"
STOP = b"X"
HAND_BACK = b"H"

# From the process.
STARTED = b"S"  #: the process has the request
PROGRESS = b"B"  #: phase, step, tools, and the longest time until the next message
CALL = b"C"  #: one try of a model call
LOG = b"L"  #: a log record
JOURNAL = b"K"  #: a frame of the journal
DONE = b"D"  #: the completion, as a frame


class Frame(NamedTuple):
    """One message."""

    kind: bytes
    data: bytes = b""

    def encoded(self) -> bytes:
        """Return the bytes of the message."""
        return HEAD.pack(self.kind, len(self.data)) + self.data


@dataclass(frozen=True, slots=True)
class Preload:
    """The task of a fork server, which reads it from its standard input."""

    settings: Settings
    worker_id: str
    path: tuple[str, ...]  #: `sys.path` of the worker
    loads_plugins: bool = True  #: False: each process loads them itself

    def command(self, control_fd: int) -> list[str]:
        """Return the command of the server; `control_fd` is its end of the worker's socket."""
        # Set the path first, because the module may be importable only with it.
        program = (
            f"import sys; sys.path[:] = {list(self.path)!r}; "
            f"from workers.process.isolation_server import main; main({control_fd})"
        )
        return [sys.executable, "-c", program]
