"""The Adam optimizer with clipping of the gradient's norm.

Its state belongs into the checkpoint: without it, a restarted trainer would take other steps.
"""

from __future__ import annotations

import numpy as np

from tiny_policy.model import Parameters

_EPSILON = 1e-8
_LONGEST_GRADIENT = 1.0


class Adam:
    """Adam.

    Args:
        parameters: The weights; only their shapes matter here.
        betas: Decay of the two moments.
    """

    def __init__(self, parameters: Parameters, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.betas = betas
        self.steps = 0
        self.first = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.second = {name: np.zeros_like(value) for name, value in parameters.items()}

    def update(self, parameters: Parameters, grads: Parameters, learning_rate: float) -> None:
        """Change the parameters in place by one step."""
        self.steps += 1
        norm = np.sqrt(sum(float((grad * grad).sum()) for grad in grads.values()))
        shrink = min(1.0, _LONGEST_GRADIENT / (norm + _EPSILON))
        beta1, beta2 = self.betas
        rate = learning_rate * np.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        for name, parameter in parameters.items():
            grad = grads[name] * parameter.dtype.type(shrink)
            self.first[name] += (1 - beta1) * (grad - self.first[name])
            self.second[name] += (1 - beta2) * (grad * grad - self.second[name])
            step = self.first[name] / (np.sqrt(self.second[name]) + _EPSILON)
            parameter -= (rate * step).astype(parameter.dtype)
