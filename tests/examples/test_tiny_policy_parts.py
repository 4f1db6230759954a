"""The parts of the example that trains a tiny policy: gradients, sampling, checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

from tiny_policy.adam import Adam  # noqa: E402
from tiny_policy.chat import END, VOCABULARY, decode, encode, render  # noqa: E402
from tiny_policy.checkpoint import Checkpoint, TrainedStep  # noqa: E402
from tiny_policy.generation import Cache, Sample, generate  # noqa: E402
from tiny_policy.learning import grpo_gradient, imitation_gradient, pad  # noqa: E402
from tiny_policy.model import Parameters, Shape, Transformer, new_parameters, softmax  # noqa: E402

SMALL = Shape(vocabulary=7, positions=9, width=8, heads=2, layers=2)
STEP = 1e-6


def small_model(seed: int = 0) -> Transformer:
    """A small network in float64, with biases and gains that are not at their first values."""
    rng = np.random.default_rng(seed)
    parameters = new_parameters(SMALL, rng, np.float64)
    for value in parameters.values():
        value += rng.normal(0, 0.1, value.shape)
    return Transformer(parameters, SMALL)


def largest_difference(model: Transformer, grads: Parameters, loss) -> float:
    """The largest relative difference to finite differences, over entries of every parameter."""
    rng, worst = np.random.default_rng(1), 0.0
    assert grads.keys() == model.parameters.keys()
    for name, value in model.parameters.items():
        assert grads[name].shape == value.shape
        flat, grad = value.reshape(-1), grads[name].reshape(-1)
        for index in rng.choice(flat.size, min(6, flat.size), replace=False):
            kept = flat[index]
            flat[index] = kept + STEP
            above = loss()
            flat[index] = kept - STEP
            below = loss()
            flat[index] = kept
            numeric = (above - below) / (2 * STEP)
            worst = max(worst, abs(numeric - grad[index]) / max(1e-3, abs(numeric)))
    return worst


def test_the_network_has_the_size_that_the_documents_name():
    parameters = new_parameters(Shape(), np.random.default_rng(0))
    assert sum(value.size for value in parameters.values()) == 107_288
    assert len(VOCABULARY) == len(set(VOCABULARY)) == Shape().vocabulary


def test_gradients_of_imitation_are_those_of_finite_differences():
    rng, model = np.random.default_rng(2), small_model()
    tokens = rng.integers(7, size=(3, 9))
    targets, mask = tokens[:, 1:], (rng.random((3, 8)) < 0.6).astype(float)

    def loss() -> float:
        probabilities = softmax(model.forward(tokens[:, :-1])[0])
        chosen = np.take_along_axis(probabilities, targets[..., None], -1)[..., 0]
        return float(-(np.log(chosen) * mask).sum() / mask.sum())

    logits, saved = model.forward(tokens[:, :-1])
    grads = model.backward(imitation_gradient(logits, targets, mask), saved)
    assert largest_difference(model, grads, loss) < 1e-4


def test_gradients_of_grpo_are_those_of_the_clipped_loss():
    rng, model = np.random.default_rng(3), small_model()
    tokens = rng.integers(7, size=(4, 9))
    targets, mask = tokens[:, 1:], (rng.random((4, 8)) < 0.7).astype(float)
    advantages = np.array([1.0, -1.0, 0.5, -2.0])

    def logprobs() -> np.ndarray:
        probabilities = softmax(model.forward(tokens[:, :-1])[0])
        return np.log(np.take_along_axis(probabilities, targets[..., None], -1)[..., 0])

    old = logprobs() + rng.choice([-0.5, 0.0, 0.05, 0.5], size=mask.shape)

    def loss() -> float:
        ratio = np.exp(logprobs() - old)
        bounded = np.clip(ratio, 0.8, 1.28)
        sign = advantages[:, None]
        return float(-(np.minimum(ratio * sign, bounded * sign) * mask).sum() / 5.0)

    logits, saved = model.forward(tokens[:, :-1])
    d_logits = grpo_gradient(
        logits, targets, mask, old_logprobs=old, advantages=advantages, tokens=5.0
    )
    assert largest_difference(model, model.backward(d_logits, saved), loss) < 1e-4


def test_padding_at_the_right_end_changes_no_logit_before_it():
    model = small_model()
    row = [1, 2, 3, 4]
    alone = model.forward(np.array([row]))[0][0]
    beside = model.forward(pad([row, [5] * 8], np.int64))[0][0, :4]
    assert np.abs(alone - beside).max() < 1e-12


def test_the_cache_gives_the_logits_of_a_whole_forward_pass():
    model = small_model()
    prompts = [[1, 2, 3], [4, 5, 6, 0, 1]]
    samples = [Sample(prompt, 3, 1.0, np.random.default_rng(0)) for prompt in prompts]
    cache = Cache(model, samples, np.array([3, 5]))
    tokens = [[2, 4, 6], [3, 3, 1]]
    for count in (1, 2, 3):
        found = cache.next_logits(np.array([row[count - 1] for row in tokens]))
        for row, (prompt, more) in enumerate(zip(prompts, tokens, strict=True)):
            whole = model.forward(np.array([prompt + more[:count]]))[0][0, -1]
            assert np.abs(found[row] - whole).max() < 1e-12


def test_a_completion_does_not_depend_on_its_batch():
    model = Transformer(new_parameters(Shape(), np.random.default_rng(0)))
    prompts = [encode("Q12+34;A"), encode("Q12+34;Ac12+34;T46;A"), encode("Q98*76;A")]

    def completions(batch: list[int]) -> dict[int, list[int]]:
        chosen = {at: Sample(prompts[at], 8, 1.0, np.random.default_rng(at)) for at in batch}
        generate(model, list(chosen.values()))
        return {at: sample.tokens for at, sample in chosen.items()}

    together = completions([0, 1, 2])
    assert all(completions([at])[at] == together[at] for at in range(3))
    assert all(len(tokens) == 8 or tokens[-1] == END for tokens in together.values())


def test_recorded_logprobs_are_those_that_training_computes():
    model = Transformer(new_parameters(Shape(), np.random.default_rng(0)))
    sample = Sample(encode("Q12+34;A"), 8, 1.0, np.random.default_rng(5))
    generate(model, [sample])
    row = np.array([sample.prompt + sample.tokens])
    probabilities = softmax(model.forward(row[:, :-1])[0])[0]
    places = np.arange(len(sample.prompt) - 1, row.shape[1] - 1)
    trained = np.log(probabilities[places, sample.tokens])
    assert np.abs(trained - sample.logprobs).max() < 1e-4


@pytest.mark.parametrize("tokens", [[21, 3, END], [END], [22, 22, 19, 20, 18, 1, 2, 3]])
def test_each_turn_is_an_exact_prefix_of_the_next_prompt(tokens: list[int]):
    first = render([{"role": "user", "content": "12+34"}])
    text = decode(tokens).removesuffix(";")
    second = render(
        [
            {"role": "user", "content": "12+34"},
            {"role": "assistant", "content": text},
            {"role": "tool", "content": "46"},
        ]
    )
    assert second[: len(first) + len(tokens)] == first + tokens


def test_what_the_vocabulary_cannot_write_is_refused():
    with pytest.raises(ValueError, match="'x'"):
        encode("1x2")
    with pytest.raises(ValueError, match="system"):
        render([{"role": "system", "content": "1"}])


def test_training_goes_on_from_a_checkpoint_as_without_it(tmp_path: Path):
    rng = np.random.default_rng(0)
    grads = [new_parameters(SMALL, rng) for _ in range(4)]
    path = tmp_path / "checkpoint.npz"
    checkpoints = []
    for stops in (False, True):
        parameters = new_parameters(SMALL, np.random.default_rng(9))
        checkpoint = Checkpoint(parameters, Adam(parameters))
        for step, grad in enumerate(grads):
            checkpoint.adam.update(checkpoint.parameters, grad, 1e-2)
            checkpoint.history.append(TrainedStep(step, 0.5, [f"group-{step}"]))
            if stops:
                checkpoint.save(path)
                checkpoint = Checkpoint.load(path)
        checkpoints.append(checkpoint)
    whole, stopped = checkpoints
    assert stopped.step == 3
    assert stopped.version == 4
    assert stopped.history == whole.history
    assert all(
        np.array_equal(whole.parameters[name], stopped.parameters[name])
        for name in whole.parameters
    )
