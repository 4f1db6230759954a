"""Groups for trainers, from rows of the store and the bodies that belong to them.

Used for leased batches and for groups that are read without a lease. Must not: lease or change
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Engine

from pipeline.contract.errors import UnreadableBody
from pipeline.queue.payloads import PayloadStore
from pipeline.store.engine import transact
from pipeline.store.stored_bodies import read_body_row
from pipeline.store.train_batch_rows import BatchGroup, BatchRollout
from pipeline.trainer.bodies import read_body, read_tokens
from pipeline.trainer.train_batch import TrainGroup, TrainRollout


class RolloutBodies(NamedTuple):
    """The bodies of a rollout: its tokens, or without tokens the body of its trajectory."""

    tokens: bytes
    body: bytes | None


class GroupReader:
    """Reads bodies, and makes groups of them and their rows."""

    def __init__(self, engine: Engine, payloads: PayloadStore | None) -> None:
        self._engine = engine
        self._payloads = payloads

    def read(
        self, rollouts: Sequence[BatchRollout]
    ) -> tuple[dict[UUID, RolloutBodies], dict[UUID, UnreadableBody]]:
        """Return the bodies by rollout, and the first error of each group that has one.

        Raises:
            ServiceUnavailable: The payload store does not answer.
        """
        bodies: dict[UUID, RolloutBodies] = {}
        unreadable: dict[UUID, UnreadableBody] = {}
        for row in rollouts:
            if row.group_id in unreadable:
                continue
            try:
                tokens = read_tokens(row, self._payloads)
                body = None if tokens else read_body(row, self._payloads) or b""
                bodies[row.rollout_id] = RolloutBodies(tokens, body)
            except UnreadableBody as error:
                unreadable[row.group_id] = error
        return bodies, unreadable

    def groups(
        self,
        groups: Sequence[BatchGroup],
        rollouts: Sequence[BatchRollout],
        bodies: Mapping[UUID, RolloutBodies],
    ) -> tuple[TrainGroup, ...]:
        """Return the groups, in the order of their rows; each rollout needs its bodies."""
        members: dict[UUID, list[TrainRollout]] = {}
        for row in rollouts:
            found = bodies[row.rollout_id]
            rollout = TrainRollout(
                rollout_id=row.rollout_id,
                rollout_index=row.rollout_index,
                reward=row.reward,
                stop_reason=row.stop_reason,
                attempt_no=row.attempt_no,
                tokens=found.tokens,
                codec=row.codec or "zstd+json",
                version_min=row.version_min,
                version_max=row.version_max,
                _read_body=partial(self._body_of, row, found.body),
            )
            members.setdefault(row.group_id, []).append(rollout)
        return tuple(
            TrainGroup(
                group_id=row.group_id,
                group_no=row.group_no,
                n_target=row.n_target,
                prompt=row.payload,
                rollouts=tuple(members.get(row.group_id, ())),
                reward_mean=row.reward_mean,
                reward_std=row.reward_std,
            )
            for row in groups
        )

    def _body_of(self, row: BatchRollout, body: bytes | None) -> bytes:
        """Return the body of a rollout; of one with tokens it is read when it is asked for."""
        if body is not None:
            return body
        stored = transact(self._engine, read_body_row, row.rollout_id, row.attempt_no)
        return read_body(stored, self._payloads) or b""
