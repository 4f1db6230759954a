"""Rows of a train batch: segments with the reward and the names of their rollout, and their shards.

Made by `TrainBatch.rows`, read by trainers and their adapters. Must not: know the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args
from uuid import UUID

from pipeline.contract.errors import InputError
from pipeline.tokens.segments import Segment

#: The parts of a batch that are spread over the ranks: single rows, or groups as a whole.
Balance = Literal["tokens", "groups"]


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


def shard_rows(
    rows: Sequence[TokenRow], rank: int, world_size: int, balance: Balance
) -> list[TokenRow]:
    """Return the rows of one rank, in their order; each row belongs to exactly one rank.

    The shards' tokens differ by the longest row (`groups`: the longest group) at most, and their
    numbers of rows (of groups) by one. The shards depend on the rows alone.

    Raises:
        InputError: There is no such rank, or no such balance.
    """
    if balance not in get_args(Balance):
        known = ", ".join(get_args(Balance))
        raise InputError(f"There is no balance {balance!r}.", remedy=f"Known: {known}.")
    if not 0 <= rank < world_size:
        raise InputError(f"There is no rank {rank} of {world_size}.", remedy="Ranks count from 0.")
    parts: dict[UUID | int, list[int]] = {}
    for index, row in enumerate(rows):
        parts.setdefault(row.group_id if balance == "groups" else index, []).append(index)
    sizes = {key: sum(len(rows[index].token_ids) for index in parts[key]) for key in parts}
    longest_first = sorted(parts, key=lambda key: (-sizes[key], parts[key][0]))
    loads = [0] * world_size
    chosen: list[int] = []
    # Each round gives every rank one part, the longest to the rank with the fewest tokens. So the
    # loads never differ by more than two parts of a round did.
    for begin in range(0, len(longest_first), world_size):
        fewest_first = sorted(range(world_size), key=lambda each: (loads[each], each))
        for each, key in zip(fewest_first, longest_first[begin : begin + world_size], strict=False):
            loads[each] += sizes[key]
            chosen += parts[key] if each == rank else ()
    return [rows[index] for index in sorted(chosen)]
