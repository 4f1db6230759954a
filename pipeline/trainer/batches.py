"""The batches of one consumer: leased, read, and handed out when every trajectory was read.

Used by the trainer client. A group whose trajectories cannot be read is dropped, and another takes
its place; a batch that was handed out does not change. Must not: read the payload store inside a
transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import ServiceUnavailable, UnreadableBody
from pipeline.contract.rollout import DropReason, RunState, group_label_of
from pipeline.contract.train_batch import BatchSpec
from pipeline.queue.claim_checks import E_BODY_GONE
from pipeline.queue.payloads import E_PAYLOADS, PayloadStore
from pipeline.store.batch_leases import LeasedBatch, hand_out_batch, lease_batch
from pipeline.store.dropped_groups import drop_unreadable
from pipeline.store.engine import transact
from pipeline.store.runs import Run
from pipeline.store.status import run_state
from pipeline.store.train_batch_rows import BatchGroup, BatchRollout, read_batch
from pipeline.store.train_batches import abandon_batch
from pipeline.trainer.train_batch import TrainBatch
from pipeline.trainer.train_groups import GroupReader

log = logging.getLogger(__name__)

E_NOT_REPEATABLE = "E208"


class _Rows(NamedTuple):
    leased: LeasedBatch
    groups: list[BatchGroup]
    rollouts: list[BatchRollout]

    @property
    def is_final(self) -> bool:
        """Whether a trainer may have the batch already, so that it must not change."""
        # Bodies in the database are the same for every reader, so that nothing is written when
        # such a batch is handed out.
        return self.leased.handed_out or (self.leased.replayed and not self.needs_store)

    @property
    def needs_store(self) -> bool:
        return any(_is_elsewhere(row) for row in self.rollouts)


class ConsumerBatches:
    """Leases and reads batches of one run for one consumer."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        *,
        consumer: str,
        payloads: PayloadStore | None,
        lease_s: float,
    ) -> None:
        self._engine = engine
        self._run = run
        self._consumer = consumer
        self._payloads = payloads
        self._reader = GroupReader(engine, payloads)
        self._lease_s = lease_s

    def take(
        self, step: int, spec: BatchSpec, *, policy_version: int | None
    ) -> TrainBatch | RunState:
        """Return the batch of a step, or the run's state while too few groups are ready.

        Raises:
            NotAllowed: Another consumer took over this step's groups.
            UnreadableBody: The step was handed out before, and now a trajectory cannot be read.
            ServiceUnavailable: The payload store does not answer, or has nothing of this run.
        """
        while True:
            rows = transact(self._engine, self._lease, step, spec, policy_version)
            if isinstance(rows, RunState):
                return rows
            bodies, unreadable = self._reader.read(rows.rollouts)
            if unreadable and rows.is_final:
                raise self._not_repeatable(step, rows.groups, unreadable)
            if unreadable:
                self._replace(step, rows, unreadable)
            elif rows.is_final or not rows.needs_store or self._hand_out(rows.leased):
                groups = self._reader.groups(rows.groups, rows.rollouts, bodies)
                return TrainBatch(
                    self._run.slug, self._consumer, step, groups, rows.leased.replayed, spec
                )

    def _lease(
        self, connection: Connection, step: int, spec: BatchSpec, policy_version: int | None
    ) -> _Rows | RunState:
        leased = lease_batch(
            connection,
            self._run,
            consumer=self._consumer,
            step=step,
            spec=spec,
            policy_version=policy_version,
            lease_s=self._lease_s,
        )
        if leased is None:
            return run_state(connection, self._run)
        return _Rows(leased, *read_batch(connection, leased.batch_id))

    def _hand_out(self, leased: LeasedBatch) -> bool:
        return transact(self._engine, hand_out_batch, leased)

    def _replace(self, step: int, rows: _Rows, unreadable: Mapping[UUID, UnreadableBody]) -> None:
        """Drop unreadable groups and give back the others, for the next lease of this step."""
        self._require_store(unreadable)
        reasons = {group_id: str(error) for group_id, error in unreadable.items()}
        leased = rows.leased

        def work(connection: Connection) -> bool:
            is_dropped = drop_unreadable(connection, leased.batch_id, leased.manifest, reasons)
            if is_dropped:
                abandon_batch(
                    connection,
                    self._run,
                    consumer=self._consumer,
                    step=step,
                    reason=DropReason.UNREADABLE,
                )
            return is_dropped

        if transact(self._engine, work):
            for label, error in self._labelled(rows.groups, unreadable):
                log.warning("Group %s is dropped: %s", label, error)

    def _require_store(self, unreadable: Mapping[UUID, UnreadableBody]) -> None:
        """Tell a missing store, such as a folder that is not mounted, from missing objects."""
        gone = [error for error in unreadable.values() if error.code == E_BODY_GONE]
        if not gone or self._payloads is None:
            return
        if next(self._payloads.find(f"{self._run.run_id}/"), None) is None:
            raise ServiceUnavailable(
                f"The payload store has no trajectory of run {self._run.slug}.",
                why=f"No group was dropped. {gone[0].what}",
                remedy="Check ROLLOUT_PAYLOADS__URL and ROLLOUT_AWS__S3_ENDPOINT_URL, and whether "
                "the folder is mounted here.",
                code=E_PAYLOADS,
            ) from gone[0]

    def _not_repeatable(
        self, step: int, groups: Sequence[BatchGroup], unreadable: Mapping[UUID, UnreadableBody]
    ) -> UnreadableBody:
        label, error = self._labelled(groups, unreadable)[0]
        return UnreadableBody(
            f"Step {step} of consumer {self._consumer} cannot be given again as it was.",
            why=f"Group {label}: {error}",
            remedy=f"Restore the object. Or, if the step is not committed, give up the group "
            f"(rollout drop group {label}) or the whole step (TrainerClient.abandon), and pull it "
            "again. Skip a committed step.",
            code=E_NOT_REPEATABLE,
        )

    def _labelled(
        self, groups: Sequence[BatchGroup], unreadable: Mapping[UUID, UnreadableBody]
    ) -> list[tuple[str, UnreadableBody]]:
        return [
            (group_label_of(self._run.slug, group.group_no), unreadable[group.group_id])
            for group in groups
            if group.group_id in unreadable
        ]


def _is_elsewhere(row: BatchRollout) -> bool:
    """Say whether the payload store holds what a trainer needs of a rollout."""
    if row.tokens_digest is not None:
        return row.tokens is None
    return row.body is None and row.body_uri is not None
