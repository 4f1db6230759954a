"""Trajectories as JSON files in a folder.

Used by `AgenticRollout` for `save_trajectories`. Must not: replace a file, or leave an incomplete
one.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path

from workers.core.trajectory import Trajectory


def write_trajectories(folder: Path, trajectories: list[Trajectory]) -> list[Path]:
    """Write trajectories, each removed from the list when it is written; return the paths.

    The request id names the file; a second file of the same id gets a number.
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
    # Write a partial file and link it under a free name: readers never see an incomplete file, and
    # no file is replaced.
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
