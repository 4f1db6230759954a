"""A trainer that is started again whenever it dies, until it has trained all there was.

Used by tests and the campaign: each life may be told where to end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.faults import trainer
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.processes import OwnProcess

#: Deaths in each place of a step, at a step of its own.
EVERY_PLACE = tuple(f"{place}:{step}" for step, place in enumerate(trainer.PLACES, start=1))

_MOST_LIVES = 40
_LIFE_S = 600.0


class TrainerLives(threading.Thread):
    """Runs a trainer, life after life; join it, then ask for its `failure`.

    Args:
        deployment: Where the run is.
        run: Its slug.
        consumer: Who trains.
        checkpoint: Its checkpoint file.
        groups: Groups in a train batch.
        ends: Where each life ends (`PLACE:STEP`); the ones after these end by themselves.
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
        self._command = trainer.command(run, consumer, checkpoint, groups=groups)
        self._ends: Iterator[str] = iter(ends)

    def run(self) -> None:
        """Live until a life ends well."""
        log = self._deployment.folder / "logs" / f"trainer-{self.consumer}.log"
        while self.deaths < _MOST_LIVES:
            end = next(self._ends, None)
            more = {trainer.DIE_VARIABLE: end} if end else {}
            environment = self._deployment.environment | more
            process = OwnProcess(self.consumer, self._command, environment, log)
            if process.wait(_LIFE_S) == 0:
                self.failure = None
                return
            self.deaths += 1
        self.failure = log.read_text()[-2000:]
