"""Advantages, against values worked out by hand."""

from __future__ import annotations

from math import sqrt
from uuid import UUID

import pytest

from pipeline.contract.advantages import advantages_of
from pipeline.contract.errors import InputError
from pipeline.trainer.train_batch import TrainBatch, TrainGroup, TrainRollout

PAIR, FOUR = [0.0, 1.0], [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("grpo", [PAIR], [[-sqrt(0.5), sqrt(0.5)]]),
        ("grpo", [FOUR], [[1.5, -0.5, -0.5, -0.5]]),  # std 0.5
        ("grpo", [[0.1, 0.1, 0.1]], [[0.0, 0.0, 0.0]]),
        ("dr_grpo", [FOUR], [[0.75, -0.25, -0.25, -0.25]]),
        ("rloo", [FOUR], [[1.0, -1 / 3, -1 / 3, -1 / 3]]),
        ("rloo", [[3.0]], [[3.0]]),
        # Centred: -0.5, 0.5, -1, 1; their mean is 0, their variance 2.5 / 3.
        (
            "reinforce_pp_baseline",
            [PAIR, [0.0, 2.0]],
            [
                [-0.5 / sqrt(2.5 / 3), 0.5 / sqrt(2.5 / 3)],
                [-1 / sqrt(2.5 / 3), 1 / sqrt(2.5 / 3)],
            ],
        ),
    ],
)
def test_advantages_are_those_of_the_formula(kind, rewards, expected):
    found = advantages_of(rewards, kind)
    for group, wanted in zip(found, expected, strict=True):
        assert group == pytest.approx(wanted, abs=1e-5)


def test_an_unknown_kind_is_told_with_those_that_exist():
    with pytest.raises(InputError, match="grpo, dr_grpo, rloo"):
        advantages_of([PAIR], "ppo")  # pyright: ignore[reportArgumentType]


def batch(*rewards: float | None) -> TrainBatch:
    rollouts = tuple(
        TrainRollout(UUID(int=i), i, reward, None, 1) for i, reward in enumerate(rewards)
    )
    group = TrainGroup(UUID(int=99), 0, len(rewards), {}, rollouts, None, None)
    return TrainBatch("math7", "trainer", 3, (group,), replayed=False)


def test_a_batch_gives_the_advantage_of_each_rollout():
    assert batch(*PAIR).advantages("dr_grpo") == {UUID(int=0): -0.5, UUID(int=1): 0.5}


def test_a_rollout_without_a_reward_gets_no_invented_advantage():
    with pytest.raises(InputError, match="1 rollouts of step 3 have no reward"):
        batch(1.0, None).advantages()
