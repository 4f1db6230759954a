"""The rewards `exact_match`, `numeric` and `gsm8k`, which compare an answer with the gold answer.

The registry imports this module on first use. Must not score a prompt without a gold answer: a
missing gold answer is an error in the data, not a wrong answer.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from pipeline.contract.errors import ContractError
from workers.rewards.answer_numbers import stated_number
from workers.rewards.registry import register_reward

# Accepts rounded decimals; no two gold numbers of gsm8k are that close.
_GSM8K_TOLERANCE = Fraction(1, 10**6)


@register_reward("exact_match", inline=True)
def exact_match(response: str, answer: Any, *, ignore_case: bool = False) -> float:
    """Return 1.0 when both texts are equal except for white space at their ends."""
    given, gold = response.strip(), _gold_text(answer).strip()
    if ignore_case:
        given, gold = given.casefold(), gold.casefold()
    return float(given == gold)


@register_reward("numeric", inline=True)
def numeric(
    response: str, answer: Any, *, tolerance: float = 1e-6, relative_tolerance: float = 0.0
) -> float:
    """Return 1.0 when the numbers differ by at most the larger of the two tolerances."""
    gold, given = _gold_number(answer), stated_number(response)
    if given is None:
        return 0.0
    return float(abs(given - gold) <= max(tolerance, relative_tolerance * abs(gold)))


@register_reward("gsm8k", inline=True)
def gsm8k(response: str, answer: Any) -> float:
    r"""Return 1.0 when the answer's number (boxed, after `####`, or its last) is the gold one."""
    gold, given = _gold_number(answer), stated_number(response)
    return float(given is not None and abs(given - gold) <= _GSM8K_TOLERANCE)


def _gold_text(answer: Any) -> str:
    if answer is None:
        raise ContractError(
            "The prompt has no field 'answer' to compare with. Name the field that holds it with "
            "--answer-field when the dataset is enqueued.",
            code="missing_answer",
        )
    return str(answer)


def _gold_number(answer: Any) -> Fraction:
    text = _gold_text(answer)
    number = stated_number(text)
    if number is None:
        raise ContractError(
            f"The prompt's answer has no number in it: {text[:80]!r}.", code="missing_answer"
        )
    return number
