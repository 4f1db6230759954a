"""A train batch as verl's `DataProto`, for trainers with verl's estimators (V0).

Needs the extra `verl`, whose import takes seconds. Must not: commit a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.contract.errors import NotAllowed
from pipeline.trainer.adapters import E_UNFIT
from pipeline.trainer.adapters.verl_rows import described_rows
from pipeline.trainer.extras import require_extra
from pipeline.trainer.train_batch import TrainBatch


def data_proto(
    batch: TrainBatch,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_id: int = 0,
) -> Any:
    """Return a batch as a `DataProto`, one row for each rollout, group by group.

    Args:
        batch: Its spec gives one segment for each rollout (`segments` is `error`, `last` or
            `longest`), because verl's estimators take rows for independent samples.
        prompt_length: As in `TrainBatch.to_padded`.
        response_length: Likewise.
        pad_id: The padding token.

    Returns:
        Tensors as `TrainBatch.to_padded`; of no tensors `uid` (the group's id), `rollout_id`,
        `raw_prompt`, `data_source`, `reward_model`, `__num_turns__`, `multi_modal_inputs`,
        `min_global_steps`, `max_global_steps`. `meta_info` has `global_steps` (the step), and
        `prompts_cut` and `responses_cut`, the numbers of rows that were longer than allowed.

    Raises:
        MissingExtra: verl is not installed.
        NotAllowed: A rollout has several rows.
        InputError: A rollout has no reward.
    """
    require_extra("verl", "verl", use="DataProto needs")
    import torch  # type: ignore[import-not-found]
    from verl.protocol import DataProto  # type: ignore[import-not-found]

    described = list(described_rows(batch))
    rows = [row for row, _ in described]
    if len({row.rollout_id for row in rows}) < len(rows):
        raise NotAllowed(
            f"Rollouts of step {batch.step} have several segments.",
            why="verl's estimators would take each of them for a rollout.",
            remedy="Use BatchSpec(segments='last'), 'longest' or 'error'; or verl's V1, which "
            "knows several rows of a rollout.",
            code=E_UNFIT,
        )
    columns = batch.to_padded(prompt_length, response_length, pad_id)
    width_p, width_r = columns["prompts"].shape[1], columns["responses"].shape[1]
    cells = [
        {"uid": str(row.group_id), "__num_turns__": other.pop("num_turns"), **other}
        for row, other in described
    ]
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(column) for name, column in columns.items()},
        non_tensors={name: _objects([cell[name] for cell in cells]) for name in cells[0]}
        if cells
        else {},
        meta_info={
            "global_steps": batch.step,
            "prompts_cut": sum(len(row.prompt_ids) > width_p for row in rows),
            "responses_cut": sum(len(row.response_ids) > width_r for row in rows),
        },
    )


def _objects(values: list[Any]) -> Any:
    """Return a column of objects: numpy would make a matrix of equally long lists."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
