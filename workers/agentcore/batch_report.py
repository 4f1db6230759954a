"""The report of a batch: the number of failures, the mean reward with its error, pass@k.

Rewards of one input are alike, so the standard error is clustered by input. `BatchRunner` calls it.
Must not: read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Rewards from here on count as solved.
_SOLVED = 1.0


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Figures of a batch; `mean` and `std_error` are None without any reward."""

    items: int
    failed: int
    mean: float | None
    std_error: float | None
    pass_at: Mapping[int, float]  #: by k, for inputs with at least k rewards

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.items} items, {self.failed} failed, no reward"
        error = "" if self.std_error is None else f" ± {self.std_error:.3f}"
        passes = "".join(f", pass@{k} {rate:.3f}" for k, rate in sorted(self.pass_at.items()))
        return f"{self.items} items, {self.failed} failed, reward {self.mean:.3f}{error}{passes}"


def reward_of(result: Mapping[str, Any]) -> float | None:
    """Return a result's reward: the number, or the last one of the list; None: it has none."""
    rewards = result.get("rewards")
    if isinstance(rewards, list):
        rewards = rewards[-1] if rewards else None
    if isinstance(rewards, bool) or not isinstance(rewards, int | float):
        return None
    return float(rewards) if math.isfinite(rewards) else None


def report_of(rewards: Mapping[str, Sequence[float]], *, items: int, failed: int) -> BatchReport:
    """Return the report.

    Args:
        rewards: By input, the rewards of its successful sessions.
        items: Of the batch.
        failed: Items without success.
    """
    groups = [list(group) for group in rewards.values() if group]
    n = sum(map(len, groups))
    if not n:
        return BatchReport(items, failed, None, None, {})
    mean = sum(map(sum, groups)) / n
    error = None
    if len(groups) > 1:
        residuals = (sum(reward - mean for reward in group) for group in groups)
        inflation = len(groups) / (len(groups) - 1)
        error = math.sqrt(inflation * sum(residual**2 for residual in residuals)) / n
    most = max(map(len, groups))
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return BatchReport(items, failed, mean, error, {k: _pass_at(k, groups) for k in powers})


def _pass_at(k: int, groups: Sequence[Sequence[float]]) -> float:
    """Return the probability that one of k sessions solves its input, without bias."""
    rates = [
        1.0 - math.comb(len(group) - solved, k) / math.comb(len(group), k)
        for group in groups
        if len(group) >= k
        for solved in [sum(reward >= _SOLVED for reward in group)]
    ]
    return sum(rates) / len(rates)
