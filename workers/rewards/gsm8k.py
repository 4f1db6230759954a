"""The reward `gsm8k`: grade-school mathematics, gold number after `####`.

Imported by the registry on first use. Must not: be lenient about the number itself.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from workers.rewards.answer_numbers import stated_number
from workers.rewards.gold_answer import gold_number
from workers.rewards.registry import register_reward

# For decimals that were rounded somewhere; no gold number is that close to another.
_TOLERANCE = Fraction(1, 10**6)


@register_reward("gsm8k", inline=True)
def gsm8k(response: str, answer: Any) -> float:
    r"""Return 1.0 when the answer's number (boxed, after `####`, or its last) is the gold one."""
    gold, given = gold_number(answer), stated_number(response)
    return float(given is not None and abs(given - gold) <= _TOLERANCE)
