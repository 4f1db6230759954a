"""Samples completions for many prompts at once, with a cache of keys and values.

The server calls it with all requests that wait. Each request has its own random numbers, so its
completion does not depend on the requests that happen to share its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiny_policy.chat import END
from tiny_policy.model import MINUS_INFINITY, Array, Transformer, softmax


@dataclass
class Sample:
    """One request and its completion."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the end was sampled or the longest completion is reached."""
        return bool(self.tokens) and (self.tokens[-1] == END or len(self.tokens) >= self.max_tokens)

    def draw(self, logits: Array) -> None:
        """Sample the next token; temperature 0 takes the likeliest.

        The logprob is that of the sampling distribution, as a trainer's ratios need it.
        """
        scaled = logits.astype(np.float64) / (self.temperature or 1.0)
        probabilities = softmax(scaled)
        if self.temperature == 0:
            token = int(probabilities.argmax())
        else:
            position = np.searchsorted(np.cumsum(probabilities), self.rng.random())
            token = min(int(position), len(probabilities) - 1)
        self.tokens.append(token)
        self.logprobs.append(float(np.log(probabilities[token])))


def generate(model: Transformer, samples: Sequence[Sample]) -> None:
    """Complete all samples in place."""
    lengths = np.array([len(sample.prompt) for sample in samples])
    cache = Cache(model, samples, lengths)
    logits = cache.prompt_logits
    while True:
        for sample, row in zip(samples, logits, strict=True):
            if not sample.is_done:
                sample.draw(row)
        if all(sample.is_done for sample in samples):
            return
        # A row that is done goes on with its last token; its logits are not read.
        logits = cache.next_logits(np.array([sample.tokens[-1] for sample in samples]))


class Cache:
    """The keys and values [B, heads, T, width / heads] of each layer, for tokens read so far."""

    def __init__(self, model: Transformer, samples: Sequence[Sample], lengths: Array) -> None:
        self._model = model
        self._positions = lengths.copy()  #: of the next token of each row
        self._rows = np.arange(len(samples))
        longest = int(lengths.max())
        room = longest + max(sample.max_tokens for sample in samples)
        padded = np.zeros((len(samples), longest), np.int64)
        for row, sample in enumerate(samples):
            padded[row, : len(sample.prompt)] = sample.prompt
        logits, saved = model.forward(padded)
        self.prompt_logits = logits[self._rows, lengths - 1]
        self._layers = [
            [np.pad(part, ((0, 0), (0, 0), (0, room - longest), (0, 0))) for part in keys_values]
            for keys_values in model.keys_and_values(saved)
        ]

    def next_logits(self, tokens: Array) -> Array:
        """Read one more token in each row and return the logits [B, vocabulary] after it."""
        model, p, at = self._model, self._model.parameters, self._positions
        hidden = (p["token"][tokens] + p["position"][at])[:, None]
        places = np.arange(self._layers[0][0].shape[2])
        mask = np.where(places > at[:, None], MINUS_INFINITY, 0)[:, None, None].astype(hidden.dtype)
        for layer, (keys, values) in enumerate(self._layers):
            query, key, value = model.query_key_value(
                f"{layer}", model.norm(f"{layer}.norm1", hidden)
            )
            keys[self._rows, :, at] = key[:, :, 0]
            values[self._rows, :, at] = value[:, :, 0]
            mixed, _ = model.attend(query, keys, values, mask)
            hidden = hidden + model.linear(f"{layer}.out", mixed)
            hidden = hidden + model.mlp(f"{layer}", hidden)[0]
        self._positions = np.minimum(at + 1, len(places) - 1)
        return model.linear("head", model.norm("norm", hidden))[:, 0]
