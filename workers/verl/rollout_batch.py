"""Prompts from a batch, and a batch from the finished trajectories.

Called by `AgenticRollout.generate_sequences`. Must not: give a failed or unscored row a reward.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.tokens.padding import padded_columns
from workers.core.conversation import begin_trajectory
from workers.core.trajectory import Trajectory
from workers.verl.data_proto import make_data_proto
from workers.verl.token_rows import TokenRow, prompt_row, token_row

PROMPT_COLUMNS = ("raw_prompt", "messages", "content", "prompt", "question")


def prompts_of(batch: Any, tokenizer: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a batch, each with its prompt as "prompt", and the batch's meta info.

    Raises:
        ValueError: No column holds prompts.
    """
    if isinstance(batch, Sequence):
        rows = [{"prompt": row if isinstance(row, Mapping) else {"content": row}} for row in batch]
        return rows, {}
    columns = dict(getattr(batch, "non_tensor_batch", None) or {})
    rows = [
        {name: column[number] for name, column in columns.items()}
        for number in range(_n_rows(batch, columns))
    ]
    column = next((name for name in PROMPT_COLUMNS if name in columns), None)
    if column is not None:
        for row in rows:
            row["prompt"] = _prompt_of_row(row, row[column])
    else:
        texts = _decoded(batch, tokenizer)
        for row, text in zip(rows, texts, strict=True):
            row["prompt"] = _prompt_of_row(row, text)
    return rows, dict(getattr(batch, "meta_info", None) or {})


def batch_of(
    rows: Sequence[Mapping[str, Any]],
    trajectories: Sequence[Trajectory],
    tokenizer: Any,
    meta_info: Mapping[str, Any],
    *,
    with_trajectories: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Return the batch of finished trajectories, in the order of the rows.

    Args:
        rows: From `prompts_of`; their other columns are passed through.
        trajectories: One per row; a failed one has `metadata["error"]`.
        tokenizer: None leaves the token columns out.
        meta_info: Kept; "prompt_length" and "response_length" set the widths.
        with_trajectories: Whether the batch has a column of whole trajectories.
        tools: The tools that were offered to the model, in the OpenAI format.
    """
    tensors = {}
    if tokenizer is not None:
        tensors = padded_columns(
            [
                _token_row(row, trajectory, tokenizer, tools)
                for row, trajectory in zip(rows, trajectories, strict=True)
            ],
            [_reward_of(trajectory) for trajectory in trajectories],
            pad_id=_pad_id(tokenizer),
            prompt_length=meta_info.get("prompt_length"),
            response_length=meta_info.get("response_length"),
        )
    columns = _passed_through(rows)
    columns |= {
        "request_id": [trajectory.request_id for trajectory in trajectories],
        "response": [trajectory.get_final_response() for trajectory in trajectories],
        "stop_reason": [trajectory.metadata.get("stop_reason") for trajectory in trajectories],
        "reward": [_reward_of(trajectory) for trajectory in trajectories],
        "failed": [_is_failed(trajectory) for trajectory in trajectories],
        "error": [trajectory.metadata.get("error") for trajectory in trajectories],
        "multi_modal_inputs": [{} for _ in trajectories],
        "__num_turns__": [_turns(trajectory) for trajectory in trajectories],
    }
    columns.setdefault("uid", [uuid.uuid4().hex for _ in trajectories])
    if with_trajectories:
        columns["trajectory"] = [trajectory.to_dict() for trajectory in trajectories]
    failed = [n for n, trajectory in enumerate(trajectories) if _is_failed(trajectory)]
    return make_data_proto(tensors, columns, {**meta_info, "failed_rows": failed})


def _n_rows(batch: Any, columns: Mapping[str, Any]) -> int:
    """Return the number of rows, also of a script's own batch without a length."""
    if columns or not hasattr(batch, "__len__"):
        return len(next(iter(columns.values()), ()))
    return len(batch)


def _prompt_of_row(row: Mapping[str, Any], given: Any) -> dict[str, Any]:
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Mapping):
        return {**row, **given}
    key = "content" if isinstance(given, str) else "messages"
    return {**{k: v for k, v in row.items() if k not in ("content", "messages")}, key: given}


def _decoded(batch: Any, tokenizer: Any) -> list[str]:
    # verl's batch is a TensorDict, which refuses `in` and has its columns in items().
    tensors = dict(batch.batch.items()) if batch.batch is not None else {}
    if tokenizer is None or "input_ids" not in tensors:
        raise ValueError(
            "the batch has no prompts: expected a non-tensor column "
            f"{', '.join(PROMPT_COLUMNS)}, or input_ids and a tokenizer"
        )
    ids = tensors["input_ids"].tolist()
    masks = tensors["attention_mask"].tolist() if "attention_mask" in tensors else None
    kept = [
        [token for token, is_real in zip(row, masks[number], strict=True) if is_real]
        if masks
        else row
        for number, row in enumerate(ids)
    ]
    return [tokenizer.decode(row) for row in kept]


def _token_row(
    row: Mapping[str, Any],
    trajectory: Trajectory,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]],
) -> TokenRow:
    if not _is_failed(trajectory):
        return token_row(trajectory, tokenizer, tools)
    # A failed row keeps its index and its prompt, and has no tokens to train on.
    return prompt_row(begin_trajectory(row["prompt"], "").get_messages(), tokenizer, tools)


def _passed_through(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = [name for name in (rows[0] if rows else ()) if name != "prompt"]
    return {name: [row[name] for row in rows] for name in names}


def _is_failed(trajectory: Trajectory) -> bool:
    return "error" in trajectory.metadata


def _reward_of(trajectory: Trajectory) -> float | None:
    return None if _is_failed(trajectory) else trajectory.final_reward


def _turns(trajectory: Trajectory) -> int:
    """Return the number of messages without the system's, which is how verl counts turns."""
    return sum(message["role"] != "system" for message in trajectory.get_messages())


def _pad_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    return 0
