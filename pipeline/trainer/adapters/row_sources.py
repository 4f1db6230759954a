"""Rows of a train batch with the groups and rollouts that they come from.

Used by the adapters whose format repeats columns of a group or rollout in each row. Must not:
import the package of a format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.tokens.rows import TokenRow
from pipeline.trainer.train_batch import TrainBatch, TrainGroup, TrainRollout


def row_sources(batch: TrainBatch) -> Iterator[tuple[TokenRow, TrainGroup, TrainRollout]]:
    """Yield each of `batch.rows()` with its group and rollout.

    Raises:
        NotAllowed: As `TrainBatch.rows`.
    """
    found = {each.rollout_id: (group, each) for group in batch.groups for each in group.rollouts}
    for row in batch.rows():
        yield row, *found[row.rollout_id]


def prompt_messages(group: TrainGroup) -> list[dict[str, Any]]:
    """Return a group's prompt as chat messages; a text is one message of the user."""
    text = {"role": "user", "content": str(group.prompt.get("content", ""))}
    return group.prompt.get("messages") or [text]
