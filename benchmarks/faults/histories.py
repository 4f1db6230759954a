"""Independent histories: what each actor did, in append-only files that survive a `kill -9`.

Written by the model server, the agents inside workers and the trainer; read once all is quiet and
held against the store. Must not: know the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

#: Where a process writes its history. Not `ROLLOUT_…`: those names belong to the settings.
FOLDER_VARIABLE = "FAULTS_HISTORIES"


def wall_clock() -> float:
    """Return the machine's own time, whatever a fault does to `time.time` in this process."""
    return time.clock_gettime(time.CLOCK_REALTIME)


class History:
    """Appends lines to the file of one actor in one process."""

    def __init__(self, folder: Path, actor: str) -> None:
        path = folder / f"{actor}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def of_environment(cls, actor: str) -> History:
        """Open the actor's file where the deployment asked for it."""
        return cls(Path(os.environ[FOLDER_VARIABLE]), actor)

    def note(self, event: str, **fields: Any) -> None:
        """Append one line; a single write, so that a killed process leaves whole lines only."""
        line = orjson.dumps({"at": wall_clock(), "event": event, **fields}) + b"\n"
        os.write(self._file, line)


def read_history(folder: Path, actor: str) -> list[dict[str, Any]]:
    """Return what all processes of an actor noted, in order of time."""
    lines = [line for path in sorted(folder.glob(f"{actor}-*.jsonl")) for line in _lines(path)]
    return sorted(lines, key=lambda line: line["at"])


def rollout_of(label: str) -> str:
    """Return the rollout's name of an attempt's label: `math7-g000013-r3-a2` without `-a2`."""
    return label.rpartition("-a")[0]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        yield orjson.loads(line)
