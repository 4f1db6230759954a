"""The trainer's checkpoint: weights, the optimizer's state and the history, in one file.

The file is replaced atomically, so that after a kill there is either the old one or the new one.
The history names the groups that each step trained. It is part of the same file as the weights, so
it says what they were trained on.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tiny_policy.adam import Adam
from tiny_policy.model import Parameters


@dataclass
class TrainedStep:
    """One step that is part of the weights."""

    step: int
    mean_reward: float
    group_ids: list[str]


@dataclass
class Checkpoint:
    """The weights after the last step of `history`; without one, those of the warm-up."""

    parameters: Parameters
    adam: Adam
    history: list[TrainedStep] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """The last trained step."""
        return self.history[-1].step if self.history else None

    @property
    def version(self) -> int:
        """The policy version: the number of trained steps."""
        return len(self.history)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file that `save` wrote."""
        with np.load(path) as stored:
            arrays = dict(stored)
        parts: dict[str, Parameters] = {"weight": {}, "first": {}, "second": {}}
        for name, value in arrays.items():
            part, _, parameter = name.partition("/")
            if part in parts:
                parts[part][parameter] = value
        about = json.loads(str(arrays["about"]))
        adam = Adam(parts["weight"])
        adam.steps, adam.first, adam.second = about["steps"], parts["first"], parts["second"]
        history = [TrainedStep(**step) for step in about["history"]]
        return cls(parts["weight"], adam, history)

    def save(self, path: Path) -> None:
        """Replace the file; when this returns, it is durable."""
        parts = {"weight": self.parameters, "first": self.adam.first, "second": self.adam.second}
        arrays = {f"{part}/{name}": a for part, group in parts.items() for name, a in group.items()}
        about = {"steps": self.adam.steps, "history": [asdict(step) for step in self.history]}
        arrays["about"] = np.array(json.dumps(about))
        unfinished = path.with_suffix(".part")
        with unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
