"""The warm-up: a new network imitates bad demonstrations for some steps.

    cd examples; python -m tiny_policy.warm_up CHECKPOINT --seed 0

It ends with a policy that knows the two turns, and confuses minus and times. Its checkpoint is the
first one of the training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from tiny_policy.adam import Adam
from tiny_policy.chat import encode
from tiny_policy.checkpoint import Checkpoint
from tiny_policy.learning import imitation_gradient, pad
from tiny_policy.model import Parameters, Shape, Transformer, new_parameters
from tiny_policy.task import demonstration, problems

STEPS = 300
_BATCH = 32
_LEARNING_RATE = 3e-3
_RISE_STEPS = 20


def warm_up(seed: int, steps: int = STEPS) -> Parameters:
    """Return the weights after the warm-up; equal for equal seeds."""
    rng = np.random.default_rng(seed)
    parameters = new_parameters(Shape(), rng)
    model, adam = Transformer(parameters), Adam(parameters, betas=(0.9, 0.98))
    for step in range(steps):
        tokens, mask = _batch(rng)
        logits, saved = model.forward(tokens[:, :-1])
        d_logits = imitation_gradient(logits, tokens[:, 1:], mask[:, 1:])
        rate = _LEARNING_RATE * min((step + 1) / _RISE_STEPS, 1.0, 2 * (1 - step / steps))
        adam.update(parameters, model.backward(d_logits, saved), rate)
    return parameters


def _batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    tokens: list[list[int]] = []
    masks: list[list[float]] = []
    for problem in problems(rng, _BATCH):
        parts = demonstration(problem, rng)
        tokens.append([token for text, _ in parts for token in encode(text)])
        masks.append([float(is_ours) for text, is_ours in parts for _ in text])
    return pad(tokens, np.int64), pad(masks)


def main() -> None:
    """Write the first checkpoint."""
    parser = argparse.ArgumentParser(description="Make a policy from bad demonstrations.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    parameters = warm_up(options.seed)
    Checkpoint(parameters, Adam(parameters)).save(options.checkpoint)


if __name__ == "__main__":
    main()
