"""Trajectories as JSON files in a folder.

Used by `AgenticRollout` for `save_trajectories`. Must not: replace a file, or show half of one.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path

from workers.core.trajectory import Trajectory


def write_trajectories(folder: Path, trajectories: list[Trajectory]) -> list[Path]:
    """Write trajectories and empty the list, each when it is written; returns the paths.

    A file is named for the request id; a second one of the same id gets a number.
    """
    if trajectories:
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    while trajectories:
        paths.append(_write(folder, trajectories[0]))
        del trajectories[0]
    return paths


def _write(folder: Path, trajectory: Trajectory) -> Path:
    name = re.sub(r"[^\w.\-]+", "_", trajectory.request_id).strip(".")[:100] or "trajectory"
    text = json.dumps(trajectory.to_dict(), indent=2)
    # Beside, then linked under a free name: a reader never sees half a file, nothing is replaced.
    partial = folder / f".{uuid.uuid4().hex}.part"
    partial.write_text(text, encoding="utf-8")
    try:
        number = 1
        while True:
            path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
            try:
                os.link(partial, path)
                return path
            except FileExistsError:
                number += 1
    finally:
        partial.unlink()
