from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.offline_policy.arithmetic import (
    ArithmeticFailure,
    compute,
    find_expression,
    write_number,
)


@pytest.mark.parametrize(
    ("question", "expression", "result"),
    [
        ("What is 12 * (3 + 4)?", "12 * (3 + 4)", "84"),
        ("Solve this math problem: What is 15 * 24?", "15 * 24", "360"),
        ("Calculate the square root of 144", "sqrt(144)", "12"),
        ("Compute 1,200 times 3 please", "1200 * 3", "3600"),
        ("What is -5 plus 2.5?", "-5 + 2.5", "-2.5"),
        ("7 divided by 8", "7 / 8", "0.875"),
        ("1 / 3", "1 / 3", "0.3333333333"),
    ],
)
def test_a_question_is_computed(question: str, expression: str, result: str) -> None:
    assert find_expression(question) == expression
    assert write_number(compute(expression)) == result


@pytest.mark.parametrize(
    "question",
    ["", "Who wrote it?", "I have 3 apples and 4 pears.", "1 / 0", "square root of 7"],
)
def test_a_question_without_a_computable_expression_has_none(question: str) -> None:
    assert find_expression(question) is None


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "__import__('os')",
        "1/0",
        "(" * 250,
        "1+" * 140 + "1" * 90,
        "True",
        "a",
        "sqrt(-4)",
        "sqrt(2)",
        "[1]",
        "'a'*9",
        "1; 2",
    ],
)
def test_what_is_no_small_expression_fails_in_one_way(expression: str) -> None:
    with pytest.raises(ArithmeticFailure):
        compute(expression)


@given(st.text(alphabet="0123456789+-*/(). sqrt,", max_size=60))
def test_any_text_is_survived(text: str) -> None:
    expression = find_expression(text)
    assert expression is None or compute(expression) is not None
