"""The two losses: imitation of demonstrations, and GRPO with a clipped ratio.

Both return the gradient of the logits for `Transformer.backward`. Must not: change weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiny_policy.model import Array, softmax

#: Bounds of the ratio between new and old probability of a token. The upper one is wider, so that
#: unlikely tokens can become likely ("clip higher").
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def pad(rows: Sequence[Sequence[float] | Array], dtype: type = np.float32) -> Array:
    """Return rows of unequal lengths as one array, with zeros at their right ends."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded


def imitation_gradient(logits: Array, targets: Array, mask: Array) -> Array:
    """Return the gradient of the mean cross entropy of the targets where the mask is 1."""
    return _through_softmax(softmax(logits), targets, -mask / mask.sum())


def grpo_gradient(
    logits: Array,
    targets: Array,
    mask: Array,
    *,
    old_logprobs: Array,
    advantages: Array,
    tokens: float,
) -> Array:
    """Return the gradient of the clipped surrogate loss, per sampled token of the batch.

    Args:
        logits: [B, T, vocabulary] of the weights that are trained.
        targets: Tokens [B, T].
        mask: 1 where the policy sampled the target, else 0.
        old_logprobs: Recorded when the targets were sampled, [B, T].
        advantages: One per row, [B].
        tokens: Divides the sum; the sampled tokens of a batch, so that each counts the same.
    """
    probabilities = softmax(logits)
    new = np.take_along_axis(probabilities, targets[..., None], -1)[..., 0]
    ratio = np.exp(np.log(new + 1e-12) - old_logprobs)
    advantage = advantages[:, None]
    # Beyond the bounds the loss is constant: the token had its effect already.
    clipped = np.where(advantage > 0, ratio > 1 + CLIP_HIGH, ratio < 1 - CLIP_LOW)
    weight = -advantage * ratio * mask * ~clipped / tokens
    return _through_softmax(probabilities, targets, weight)


def _through_softmax(probabilities: Array, targets: Array, d_logprob: Array) -> Array:
    """Return the gradient of the logits, given that of the targets' logprobs."""
    d_logits = -probabilities * d_logprob[..., None]
    rows, places = np.indices(targets.shape)
    d_logits[rows, places, targets] += d_logprob
    return d_logits.astype(probabilities.dtype)
