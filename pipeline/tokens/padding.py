"""Rows of unequal lengths as arrays: prompts padded at their left, responses at their right.

Used by `TrainBatch.to_padded` and by the agent library's batches; the layout is verl's. Must not:
give a row without a reward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class PromptAndResponse(Protocol):
    """One row in tokens; `response_logprobs` is None unless every sampled token has one."""

    @property
    def prompt_ids(self) -> Sequence[int] | Array:
        """Tokens before the first sampled one."""
        ...

    @property
    def response_ids(self) -> Sequence[int] | Array:
        """Tokens from the first sampled one on."""
        ...

    @property
    def response_mask(self) -> Sequence[int] | Array:
        """1 on the response's sampled tokens, else 0."""
        ...

    @property
    def response_logprobs(self) -> Sequence[float] | Array | None:
        """Of the response's tokens, 0 where the mask is 0."""
        ...


def padded_columns(
    rows: Sequence[PromptAndResponse],
    rewards: Sequence[float | None],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, Array]:
    """Return the rows as arrays, one line for each row.

    Args:
        rows: One per line of the arrays.
        rewards: One per row; None (not scored, or failed) becomes NaN and never 0.
        pad_id: The padding token.
        prompt_length: Width of the prompts, with None the longest; longer prompts are cut at their
            beginning.
        response_length: Width of the responses, likewise; longer responses are cut at their end.

    Returns:
        int64 `prompts` [B,P], `responses`, `response_mask` [B,R], `input_ids`, `attention_mask`,
        `position_ids` [B,P+R]; float32 `rm_scores` [B,R], the reward at the last response token,
        if any row has a reward; float32 `rollout_log_probs` [B,R] if all sampled tokens have one.
    """
    n = len(rows)
    width_p = prompt_length or max((len(row.prompt_ids) for row in rows), default=0)
    width_r = response_length or max((len(row.response_ids) for row in rows), default=0)
    # A batch without any response still needs one column, for the NaN of "no reward".
    width_r = max(width_r, 1)
    prompts = np.full((n, width_p), pad_id, dtype=np.int64)
    responses = np.full((n, width_r), pad_id, dtype=np.int64)
    response_mask = np.zeros((n, width_r), dtype=np.int64)
    attention_mask = np.zeros((n, width_p + width_r), dtype=np.int64)
    log_probs = np.zeros((n, width_r), dtype=np.float32)
    scores = np.zeros((n, width_r), dtype=np.float32)
    for number, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        prompt_ids = row.prompt_ids[max(0, len(row.prompt_ids) - width_p) :]
        response_ids = row.response_ids[:width_r]
        prompts[number, width_p - len(prompt_ids) :] = prompt_ids
        responses[number, : len(response_ids)] = response_ids
        response_mask[number, : len(response_ids)] = row.response_mask[:width_r]
        attention_mask[number, width_p - len(prompt_ids) : width_p + len(response_ids)] = 1
        if (given := row.response_logprobs) is not None:
            log_probs[number, : len(response_ids)] = given[:width_r]
        if reward is None:
            scores[number] = np.nan
        else:
            scores[number, max(0, len(response_ids) - 1)] = reward
    columns = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": np.clip(np.cumsum(attention_mask, axis=1) - 1, 0, None),
    }
    if any(reward is not None for reward in rewards):
        columns["rm_scores"] = scores
    answered = [row for row in rows if len(row.response_ids)]
    if answered and all(row.response_logprobs is not None for row in answered):
        columns["rollout_log_probs"] = log_probs
    return columns
