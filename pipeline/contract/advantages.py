"""Advantages of the trajectories of a batch, from their rewards: one number per trajectory.

Used by `TrainBatch.advantages`. All segments of a trajectory get its number: with segments as
samples, a trajectory of many segments would shift the mean of its group. Must not: weigh by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum, sqrt
from types import MappingProxyType
from typing import Literal, get_args

from pipeline.contract.errors import InputError

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]

#: Added to a standard deviation, so that equal rewards give 0.
_EPSILON = 1e-6


def advantages_of(rewards: Sequence[Sequence[float]], kind: AdvantageKind) -> list[list[float]]:
    """Return the advantages of all trajectories, by group.

    `grpo`: (reward - mean) / (std + 1e-6) of the group. `dr_grpo`: reward - mean. `rloo`: reward -
    mean of the others. `reinforce_pp_baseline`: reward - mean of the group, then minus the mean and
    divided by the std of the whole batch. A std is that of a sample (n - 1). A group of one
    trajectory has no baseline: the reward itself counts.

    Raises:
        InputError: There is no such kind.
    """
    if kind not in get_args(AdvantageKind):
        known = ", ".join(get_args(AdvantageKind))
        raise InputError(f"There are no advantages {kind!r}.", remedy=f"Known: {known}.")
    if kind == "reinforce_pp_baseline":
        return _whitened([_dr_grpo(group) for group in rewards])
    return [_KINDS[kind](group) for group in rewards]


def _dr_grpo(rewards: Sequence[float]) -> list[float]:
    mean = _mean(rewards) if len(rewards) > 1 else 0.0
    return [reward - mean for reward in rewards]


def _grpo(rewards: Sequence[float]) -> list[float]:
    if len(rewards) == 1:
        return list(rewards)
    std = _std(rewards)
    return [centred / (std + _EPSILON) for centred in _dr_grpo(rewards)]


def _rloo(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    factor = n / (n - 1) if n > 1 else 1.0
    return [centred * factor for centred in _dr_grpo(rewards)]


_KINDS: Mapping[str, Callable[[Sequence[float]], list[float]]] = MappingProxyType(
    {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}
)


def _whitened(groups: list[list[float]]) -> list[list[float]]:
    flat = [value for group in groups for value in group]
    if len(flat) < 2:
        return groups
    mean, std = _mean(flat), _std(flat)
    return [[(value - mean) / (std + _EPSILON) for value in group] for group in groups]


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
