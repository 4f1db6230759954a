"""Rows of a train batch: segments with the reward and the names of their rollout.

Made by `TrainBatch.rows`, read by trainers and their adapters. Must not: know the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from uuid import UUID

from pipeline.tokens.segments import Segment


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenRow(Segment):
    """One segment of a rollout, with its reward; a reward belongs to the whole rollout.

    `reward` is None where the run has none. `segment_index` counts the rows of a rollout from 0.
    """

    reward: float | None
    group_id: UUID
    rollout_id: UUID
    segment_index: int = 0


def rows_of(
    segments: Sequence[Segment], *, reward: float | None, group_id: UUID, rollout_id: UUID
) -> list[TokenRow]:
    """Return the rows of one rollout, in the order of its segments."""
    names = [field.name for field in fields(Segment)]
    return [
        TokenRow(
            **{name: getattr(segment, name) for name in names},
            reward=reward,
            group_id=group_id,
            rollout_id=rollout_id,
            segment_index=index,
        )
        for index, segment in enumerate(segments)
    ]
