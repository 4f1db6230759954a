"""The columns of a row that verl reads beside its tokens, the same in both of verl's forms.

Used by `verl_batch.py` and `verl_queue.py`. Must not: import verl or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.tokens.rows import TokenRow
from pipeline.trainer.adapters.row_sources import prompt_messages, row_sources
from pipeline.trainer.train_batch import TrainBatch


def described_rows(batch: TrainBatch) -> Iterator[tuple[TokenRow, dict[str, Any]]]:
    """Yield the rows of a batch, each with its columns that are no tensors.

    `num_turns` counts each model call as two messages, because the messages are not read.
    `min_global_steps` and `max_global_steps` are policy versions, 0 where none is known.

    Raises:
        InputError: A rollout has no reward.
    """
    batch.advantages()  # its error names the rollout and the command that scores it
    for row, group, rollout in row_sources(batch):
        yield (
            row,
            {
                "raw_prompt": prompt_messages(group),
                "data_source": batch.run,
                "reward_model": {"style": "rule", "ground_truth": group.prompt.get("answer")},
                "rollout_id": str(row.rollout_id),
                "num_turns": 2 * len(row.calls),
                "multi_modal_inputs": {},
                "min_global_steps": rollout.version_min or 0,
                "max_global_steps": rollout.version_max or 0,
            },
        )
