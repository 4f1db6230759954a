"""A trainer that is restarted whenever it dies, until it has trained all groups.

Tests and the campaign use it, and can choose the place where each process dies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.faults import trainer
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.processes import OwnProcess

#: One death at each place, each in another step.
EVERY_PLACE = tuple(f"{place}:{step}" for step, place in enumerate(trainer.PLACES, start=1))

_MOST_LIVES = 40
_LIFE_S = 600.0


class TrainerLives(threading.Thread):
    """Runs a trainer's processes one after the other; join it, then read `failure`.

    Args:
        deployment: The deployment of the run.
        run: The run's slug.
        consumer: The trainer's consumer name.
        checkpoint: The checkpoint file.
        groups: Groups in a train batch.
        ends: Places of the deaths (`PLACE:STEP`); later processes end by themselves.
    """

    def __init__(
        self,
        deployment: Deployment,
        run: str,
        consumer: str,
        checkpoint: Path,
        *,
        groups: int,
        ends: Iterable[str] = EVERY_PLACE,
    ) -> None:
        super().__init__(name=f"trainer-{consumer}", daemon=True)
        self.consumer = consumer
        self.checkpoint = checkpoint
        self.deaths = 0
        self.failure: str | None = "it never ended"
        self._deployment = deployment
        self._arguments = trainer.arguments_of(run, consumer, checkpoint, groups=groups)
        self._ends: Iterator[str] = iter(ends)

    def run(self) -> None:
        """Start processes until one succeeds."""
        log = self._deployment.folder / "logs" / f"trainer-{self.consumer}.log"
        while self.deaths < _MOST_LIVES:
            end = next(self._ends, None)
            more = {trainer.DIE_VARIABLE: end} if end else {}
            environment = self._deployment.environment | more
            process = OwnProcess(
                self._deployment.start_process(trainer.__name__, self._arguments, environment, log)
            )
            if process.wait(_LIFE_S) == 0:
                self.failure = None
                return
            self.deaths += 1
        self.failure = log.read_text()[-2000:]
