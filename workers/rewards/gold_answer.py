"""The gold answer of a prompt, as the built-in rewards need it.

Must not: let a prompt without one be scored: that is a mistake in the data, not a wrong answer.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from pipeline.contract.errors import ContractError
from workers.rewards.answer_numbers import stated_number


def gold_text(answer: Any) -> str:
    """Return the gold answer's text.

    Raises:
        ContractError: The prompt has none; code `missing_answer`.
    """
    if answer is None:
        raise ContractError(
            "The prompt has no field 'answer' to compare with. Name the field that holds it with "
            "--answer-field when the dataset is enqueued.",
            code="missing_answer",
        )
    return str(answer)


def gold_number(answer: Any) -> Fraction:
    """Return the gold answer's number.

    Raises:
        ContractError: The prompt has no answer, or one without a number; code `missing_answer`.
    """
    text = gold_text(answer)
    number = stated_number(text)
    if number is None:
        raise ContractError(
            f"The prompt's answer has no number in it: {text[:80]!r}.", code="missing_answer"
        )
    return number
