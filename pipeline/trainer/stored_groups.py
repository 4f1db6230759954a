"""The groups of a run, read without a lease.

Used by exports and data sets. Must not: lease, commit or drop anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from sqlalchemy import Engine

from pipeline.contract.rollout import group_label_of
from pipeline.contract.train_batch import BatchSpec
from pipeline.queue.payloads import PayloadStore
from pipeline.store.engine import transact
from pipeline.store.runs import Run
from pipeline.store.train_batch_rows import count_group_numbers, read_stored_groups
from pipeline.trainer.train_batch import TrainBatch
from pipeline.trainer.train_groups import GroupReader

log = logging.getLogger(__name__)

#: Rollouts read at once, with their bodies: about 16 MB where every body has the largest size.
_ROLLOUTS_AT_ONCE = 64
#: The step of a batch that was not leased, and so belongs to no trainer step.
NO_STEP = -1


def group_ranges(engine: Engine, run: Run) -> Iterator[tuple[int, int]]:
    """Yield ranges of group numbers that cover a run; the groups of one are read at once."""
    at_once = max(1, _ROLLOUTS_AT_ONCE // run.config.n)
    for first in range(0, transact(engine, count_group_numbers, run.run_id), at_once):
        yield first, first + at_once


class StoredGroups:
    """The ready, leased and consumed groups of a run, some at a time, by their number.

    Each iteration reads the store anew, in flat memory. Groups that have an unreadable body are
    left out and counted.

    Args:
        engine: The trajectory store.
        run: The run.
        payloads: The payload store, needed if trajectories are stored there.
        spec: Its `segments`, `truncated` and `needs_logprobs` decide about the rows.
    """

    def __init__(
        self,
        engine: Engine,
        run: Run,
        *,
        payloads: PayloadStore | None = None,
        spec: BatchSpec | None = None,
    ) -> None:
        self._engine = engine
        self._run = run
        self._spec = spec or BatchSpec()
        self._reader = GroupReader(engine, payloads)
        self.unreadable = 0  #: groups left out by the last iteration

    def __iter__(self) -> Iterator[TrainBatch]:
        """Yield batches of groups; no transaction is open meanwhile.

        Raises:
            ServiceUnavailable: The store or the payload store does not answer.
        """
        self.unreadable = 0
        for first, end in group_ranges(self._engine, self._run):
            batch = self._read(first, end)
            if batch.groups:
                yield batch

    def _read(self, first: int, end: int) -> TrainBatch:
        groups, rollouts = transact(self._engine, read_stored_groups, self._run.run_id, first, end)
        bodies, unreadable = self._reader.read(rollouts)
        for group in groups:
            if (error := unreadable.get(group.group_id)) is not None:
                label = group_label_of(self._run.slug, group.group_no)
                log.warning("Group %s is left out: %s", label, error)
        self.unreadable += len(unreadable)
        found = self._reader.groups(
            [group for group in groups if group.group_id not in unreadable],
            [row for row in rollouts if row.group_id not in unreadable],
            bodies,
        )
        return TrainBatch(self._run.slug, "", NO_STEP, found, replayed=False, spec=self._spec)
