"""Independent histories of each actor's actions, in append-only files that survive a `kill -9`.

The model server, the agents inside workers and the trainer write them. After the run they are
compared with the store. Must not: know the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

#: Folder of a process's history. Not `ROLLOUT_…`, because those names belong to the settings.
FOLDER_VARIABLE = "FAULTS_HISTORIES"


def wall_clock() -> float:
    """Return the machine's time, even if a fault has shifted `time.time` in this process."""
    return time.clock_gettime(time.CLOCK_REALTIME)


class History:
    """Appends lines to the file of one actor in one process."""

    def __init__(self, folder: Path, actor: str) -> None:
        path = folder / f"{actor}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def of_environment(cls, actor: str) -> History:
        """Open the actor's file in the folder that the environment names."""
        return cls(Path(os.environ[FOLDER_VARIABLE]), actor)

    def note(self, event: str, **fields: Any) -> None:
        """Append one line by a single write, so that a killed process leaves only whole lines."""
        line = orjson.dumps({"at": wall_clock(), "event": event, **fields}) + b"\n"
        os.write(self._file, line)


def read_history(folder: Path, actor: str) -> list[dict[str, Any]]:
    """Return the entries of all processes of an actor, in order of time."""
    lines = [line for path in sorted(folder.glob(f"{actor}-*.jsonl")) for line in _lines(path)]
    return sorted(lines, key=lambda line: line["at"])


def rollout_of(label: str) -> str:
    """Return the rollout's name of an attempt's label: `math7-g000013-r3-a2` without `-a2`."""
    return label.rpartition("-a")[0]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        yield orjson.loads(line)
