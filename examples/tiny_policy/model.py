"""A decoder-only transformer in numpy: the forward pass, and the gradients by hand.

The server samples from it; the warm-up and the trainer compute its gradients, which a test compares
with finite differences. Must not: know the task, the optimizer or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Parameters = dict[str, Array]

#: Masked attention scores; finite, so that padding gives no NaN.
MINUS_INFINITY = -1e9
_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """The sizes of the network; the default has 107,288 parameters."""

    vocabulary: int = 24
    positions: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2


def new_parameters(shape: Shape, rng: np.random.Generator, dtype: Any = np.float32) -> Parameters:
    """Return random weights; biases are 0 and the norms' gains 1.

    Rows of a matrix have about unit length. Large position embeddings let attention find places
    early; a small head begins with nearly equal probabilities.
    """
    width, hidden = shape.width, 4 * shape.width
    matrices = {"head": (width, shape.vocabulary)}
    for layer in range(shape.layers):
        matrices |= {
            f"{layer}.qkv": (width, 3 * width),
            f"{layer}.out": (width, width),
            f"{layer}.up": (width, hidden),
            f"{layer}.down": (hidden, width),
        }
    parameters = {
        "token": rng.normal(0, 0.5, (shape.vocabulary, width)),
        "position": rng.normal(0, 0.5, (shape.positions, width)),
    }
    for name, size in matrices.items():
        parameters[name] = rng.normal(0, size[0] ** -0.5, size)
        parameters[f"{name}.bias"] = np.zeros(size[1])
    parameters["head"] *= 0.2
    for name in [*(f"{n}.norm{i}" for n in range(shape.layers) for i in (1, 2)), "norm"]:
        parameters[f"{name}.gain"] = np.ones(width)
        parameters[f"{name}.bias"] = np.zeros(width)
    return {name: value.astype(dtype) for name, value in parameters.items()}


class Transformer:
    """The network with its weights: two blocks of attention and perceptron, norms before them.

    Args:
        parameters: As `new_parameters` makes them; read at every call.
        shape: Their sizes.
    """

    def __init__(self, parameters: Parameters, shape: Shape | None = None) -> None:
        self.parameters = parameters
        self.shape = shape or Shape()

    def forward(self, tokens: Array) -> tuple[Array, list[Any]]:
        """Return the logits [B, T, vocabulary] of tokens [B, T], and what `backward` needs.

        Shorter rows are padded at their right end. Attention sees only what is to the left, so the
        padding changes nothing before it.
        """
        p, length = self.parameters, tokens.shape[1]
        hidden = p["token"][tokens] + p["position"][:length]
        mask = np.triu(np.full((length, length), MINUS_INFINITY, hidden.dtype), 1)
        saved: list[Any] = [tokens]
        for layer in range(self.shape.layers):
            attended, for_attention = self._attention(f"{layer}", hidden, mask)
            hidden = hidden + attended
            added, for_mlp = self.mlp(f"{layer}", hidden)
            hidden = hidden + added
            saved.append((for_attention, for_mlp))
        normed, for_norm = self._norm("norm", hidden)
        saved.append((normed, for_norm))
        return self.linear("head", normed), saved

    def backward(self, d_logits: Array, saved: list[Any]) -> Parameters:
        """Return the gradients of all parameters, given the gradient of the logits."""
        grads: Parameters = {}
        normed, for_norm = saved[-1]
        d_normed = self._d_linear("head", d_logits, normed, grads)
        d_hidden = self._d_norm("norm", d_normed, for_norm, grads)
        for layer in reversed(range(self.shape.layers)):
            for_attention, for_mlp = saved[1 + layer]
            d_hidden = d_hidden + self._d_mlp(f"{layer}", d_hidden, for_mlp, grads)
            d_hidden = d_hidden + self._d_attention(f"{layer}", d_hidden, for_attention, grads)
        tokens = saved[0]
        one_hot = np.eye(self.shape.vocabulary, dtype=d_hidden.dtype)[tokens.reshape(-1)]
        grads["token"] = one_hot.T @ d_hidden.reshape(-1, self.shape.width)
        grads["position"] = np.zeros_like(self.parameters["position"])
        grads["position"][: tokens.shape[1]] = d_hidden.sum(0)
        return grads

    def keys_and_values(self, saved: list[Any]) -> list[tuple[Array, Array]]:
        """Return each layer's keys and values [B, heads, T, width / heads] of a forward pass."""
        return [(for_attention[3], for_attention[4]) for for_attention, _ in saved[1:-1]]

    def linear(self, name: str, x: Array) -> Array:
        """Return `x` times the matrix, plus the bias."""
        return x @ self.parameters[name] + self.parameters[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        """Return the layer norm over the last axis."""
        return self._norm(name, x)[0]

    def query_key_value(self, layer: str, normed: Array) -> list[Array]:
        """Return the three projections, [B, heads, T, width / heads] each."""
        parts = np.split(self.linear(f"{layer}.qkv", normed), 3, -1)
        return [self._split(part) for part in parts]

    def attend(self, query: Array, key: Array, value: Array, mask: Array) -> tuple[Array, Array]:
        """Return the mixed values [B, T, width] and the attention weights."""
        weights = softmax(query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5 + mask)
        return self._merge(weights @ value), weights

    def mlp(self, layer: str, x: Array) -> tuple[Array, Any]:
        """Return what the perceptron adds, and what its gradient needs."""
        normed, for_norm = self._norm(f"{layer}.norm2", x)
        hidden = np.maximum(self.linear(f"{layer}.up", normed), 0)
        return self.linear(f"{layer}.down", hidden), (normed, for_norm, hidden)

    def _attention(self, layer: str, x: Array, mask: Array) -> tuple[Array, Any]:
        normed, for_norm = self._norm(f"{layer}.norm1", x)
        query, key, value = self.query_key_value(layer, normed)
        mixed, weights = self.attend(query, key, value, mask)
        saved = (normed, for_norm, query, key, value, weights, mixed)
        return self.linear(f"{layer}.out", mixed), saved

    def _norm(self, name: str, x: Array) -> tuple[Array, tuple[Array, Array]]:
        centred = x - x.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + _NORM_EPSILON)
        normal = centred * scale
        p = self.parameters
        return normal * p[f"{name}.gain"] + p[f"{name}.bias"], (normal, scale)

    def _d_attention(self, layer: str, d_y: Array, saved: Any, grads: Parameters) -> Array:
        normed, for_norm, query, key, value, weights, mixed = saved
        d_mixed = self._split(self._d_linear(f"{layer}.out", d_y, mixed, grads))
        d_value = weights.swapaxes(-1, -2) @ d_mixed
        d_weights = d_mixed @ value.swapaxes(-1, -2)
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
        d_scores *= query.shape[-1] ** -0.5
        parts = (d_scores @ key, d_scores.swapaxes(-1, -2) @ query, d_value)
        d_qkv = np.concatenate([self._merge(part) for part in parts], -1)
        d_normed = self._d_linear(f"{layer}.qkv", d_qkv, normed, grads)
        return self._d_norm(f"{layer}.norm1", d_normed, for_norm, grads)

    def _d_mlp(self, layer: str, d_y: Array, saved: Any, grads: Parameters) -> Array:
        normed, for_norm, hidden = saved
        d_hidden = self._d_linear(f"{layer}.down", d_y, hidden, grads) * (hidden > 0)
        d_normed = self._d_linear(f"{layer}.up", d_hidden, normed, grads)
        return self._d_norm(f"{layer}.norm2", d_normed, for_norm, grads)

    def _d_linear(self, name: str, d_y: Array, x: Array, grads: Parameters) -> Array:
        flat = d_y.reshape(-1, d_y.shape[-1])
        grads[name] = x.reshape(-1, x.shape[-1]).T @ flat
        grads[f"{name}.bias"] = flat.sum(0)
        return d_y @ self.parameters[name].T

    def _d_norm(self, name: str, d_y: Array, saved: Any, grads: Parameters) -> Array:
        normal, scale = saved
        grads[f"{name}.gain"] = (d_y * normal).sum((0, 1))
        grads[f"{name}.bias"] = d_y.sum((0, 1))
        d = d_y * self.parameters[f"{name}.gain"]
        along = (d * normal).mean(-1, keepdims=True)
        return (d - d.mean(-1, keepdims=True) - normal * along) * scale

    def _split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.shape.heads, -1).swapaxes(1, 2)

    def _merge(self, x: Array) -> Array:
        x = x.swapaxes(1, 2)
        return x.reshape(*x.shape[:2], -1)


def softmax(x: Array) -> Array:
    """Return the softmax over the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
