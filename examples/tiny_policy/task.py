"""The task: `37*48` is to be computed with a calculator, in two turns.

    user: 37*48    assistant: c37*48    tool: 1776    assistant: 1776

The network cannot compute. It can learn to copy the problem into the call, and the result into the
answer. The demonstrations of the warm-up are bad on purpose, so that training has work to do.
"""

from __future__ import annotations

import numpy as np

OPERATORS = "+-*"
_COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

#: Share of demonstrated calls that multiply where they should subtract, or the other way round.
WRONG_OPERATOR = 0.65
_CONFUSED = {"-": "*", "*": "-"}
#: Share of the digits in demonstrated calls that are typed wrong.
TYPING_ERROR = 0.02
#: Share of demonstrated answers that are the first number and not the tool's result.
WRONG_ANSWER = 0.4


def problems(rng: np.random.Generator, count: int) -> list[str]:
    """Return problems such as `37*48`, with the operators in turn."""
    numbers = rng.integers(10, 100, (count, 2))
    first = rng.integers(len(OPERATORS))
    return [
        f"{left}{OPERATORS[(first + index) % len(OPERATORS)]}{right}"
        for index, (left, right) in enumerate(numbers)
    ]


def solution(problem: str) -> str:
    """Return the value of a problem of two numbers of two digits."""
    return str(_COMPUTE[problem[2]](int(problem[:2]), int(problem[3:])))


def demonstration(problem: str, rng: np.random.Generator) -> list[tuple[str, bool]]:
    """Return a bad conversation as parts in the chat template, and whether the model wrote each."""
    operator = problem[2]
    if rng.random() < WRONG_OPERATOR:
        operator = _CONFUSED.get(operator, operator)
    left, right = _typed(problem[:2], rng), _typed(problem[3:], rng)
    result = solution(f"{left}{operator}{right}")
    answer = left if rng.random() < WRONG_ANSWER else result
    return [
        (f"Q{problem};A", False),
        (f"c{left}{operator}{right};", True),
        (f"T{result};A", False),
        (f"{answer};", True),
    ]


def _typed(number: str, rng: np.random.Generator) -> str:
    return "".join(
        str(rng.integers(1, 10)) if rng.random() < TYPING_ERROR else digit for digit in number
    )
