"""The reward `numeric`: the number the answer states is the gold number, within a tolerance.

Imported by the registry on first use. Must not: understand more than numbers.
"""

from __future__ import annotations

from typing import Any

from workers.rewards.answer_numbers import stated_number
from workers.rewards.gold_answer import gold_number
from workers.rewards.registry import register_reward


@register_reward("numeric", inline=True)
def numeric(
    response: str, answer: Any, *, tolerance: float = 1e-6, relative_tolerance: float = 0.0
) -> float:
    """Return 1.0 when the numbers differ by at most the larger of the two tolerances."""
    gold, given = gold_number(answer), stated_number(response)
    if given is None:
        return 0.0
    return float(abs(given - gold) <= max(tolerance, relative_tolerance * abs(gold)))
