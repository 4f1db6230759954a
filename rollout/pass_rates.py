"""pass@k: an unbiased estimate, from n rollouts, of the probability that one of k is correct.

The demo's summary uses it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n tries, drawn without replacement, include a correct one.

    The estimator is that of Chen et al. 2021: `1 - C(n - correct, k) / C(n, k)`.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"no pass@{k} of {correct} correct in {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def mean_pass_at_k(groups: Iterable[tuple[int, int]], k: int) -> float | None:
    """Return the mean pass@k over groups of (tries, correct); None if no group has k tries."""
    rates = [pass_at_k(n, correct, k) for n, correct in groups if n >= k]
    return sum(rates) / len(rates) if rates else None
