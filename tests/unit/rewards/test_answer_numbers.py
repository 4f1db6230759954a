from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.rewards.answer_numbers import last_boxed, stated_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("The answer is 18.", 18),
        ("#### 18", 18),
        ("work 3 + 4\n#### $1,234.50 dollars", "1234.5"),
        ("#### -5", -5),
        ("#### -$5", -5),
        ("#### $-5", -5),
        ("#### −5", -5),
        ("#### +5", 5),
        ("#### 1,450,000", 1450000),
        ("#### 18 eggs for 2 dollars", 18),
        ("#### 9 * 2 = 18", 18),
        ("#### none\nso 7", 7),
        ("first #### 3 then #### 4", 4),
        ("It costs £0.75", "0.75"),
        ("It is .5", "0.5"),
        ("5.0", 5),
        ("50%", 50),
        ("3/4", "3/4"),
        ("1 1/2 cups", "3/2"),
        ("-3/4", "-3/4"),
        ("3/0", 3),
        ("1e3", 1000),
        ("2.5E-1", "0.25"),
        ("16 - 3 - 4 = 9", 9),
        ("5 - 3", 3),
        ("16-3", 3),
        ("values 1,2,3", 3),
        ("12kg", 12),
        (r"\boxed{42}", 42),
        (r"so \boxed{x = 5} of 9", 5),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4"),
        (r"\boxed{1\frac{1}{2}}", "3/2"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{\$1{,}234}", 1234),
        (r"\boxed{1\,234\text{ km}}", 1234),
        (r"\boxed{50\%}", 50),
        (r"\boxed{\text{about } 7 \text{ cm}}", 7),
        (r"\boxed{1} and \boxed{2}", 2),
        (r"\boxed{18", 18),
        (r"\boxed{x} but 4", 4),
        ("**Answer: 18**", 18),
        ("1\u00a0000 is 7", 7),
    ],
)
def test_a_number_is_read_as_it_is_written(text: str, number: int | str) -> None:
    assert stated_number(text) == Fraction(str(number))


@pytest.mark.parametrize("text", ["", "none", "####", r"\boxed{}", "9" * 100, "\x00\ud800"])
def test_a_text_without_a_number_states_none(text: str) -> None:
    assert stated_number(text) is None


def test_boxes_may_be_nested() -> None:
    assert last_boxed(r"a \boxed{1} b \boxed{\frac{1}{2} + {3}} c") == r"\frac{1}{2} + {3}"
    assert last_boxed("nothing") is None


@given(st.text(alphabet="0123456789.,/-+$%eE #={}\\boxedfrac \n", max_size=200) | st.text())
def test_any_text_is_survived(text: str) -> None:
    stated_number(text)


@pytest.mark.parametrize(
    "text",
    [
        "1,111" * 100_000,
        "1 " * 300_000,
        "1" + " " * 300_000,
        "\\frac{" * 100_000,
        "\\boxed{" * 100_000,
        "-" * 500_000,
        "1e999 " * 50_000,
        "9" * 1_000_000,
        "1/" * 300_000,
    ],
)
def test_a_hostile_text_costs_bounded_time(text: str) -> None:
    started = time.thread_time()
    stated_number(text)
    assert time.thread_time() - started < 3
