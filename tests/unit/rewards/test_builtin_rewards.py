from __future__ import annotations

from typing import Any

import pytest

from pipeline.contract.errors import ContractError
from workers.rewards.answer_rewards import exact_match, gsm8k, numeric
from workers.rewards.registry import get_reward


def test_exact_match_forgives_white_space_at_the_ends_only() -> None:
    assert exact_match(" Paris\n", "Paris") == 1.0
    assert exact_match("Pa ris", "Paris") == 0.0
    assert exact_match("paris", "Paris") == 0.0
    assert exact_match("paris", "Paris", ignore_case=True) == 1.0
    assert exact_match("18", 18) == 1.0


def test_numeric_has_a_tolerance() -> None:
    assert numeric("about 3.14", "3.14159") == 0.0
    assert numeric("about 3.14", "3.14159", tolerance=0.01) == 1.0
    assert numeric("1010", 1000, relative_tolerance=0.01) == 1.0
    assert numeric("no idea", 3) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer follows.\n#### 18", 1.0),
        (r"\boxed{18}", 1.0),
        ("She makes $18.00 a day.", 1.0),
        ("18", 1.0),
        ("19", 0.0),
        ("-18", 0.0),
        ("18.5", 0.0),
        ("", 0.0),
        ("I do not know.", 0.0),
    ],
)
def test_gsm8k_compares_the_stated_number_with_the_marked_one(response: str, reward: float) -> None:
    gold = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs, for 9 * 2 = $18.\n#### 18"
    assert gsm8k(response, gold) == reward


@pytest.mark.parametrize("name", ["exact_match", "numeric", "gsm8k"])
def test_a_prompt_without_an_answer_is_an_error_and_never_a_zero(name: str) -> None:
    function: Any = get_reward(name).function
    with pytest.raises(ContractError, match="no field 'answer'") as caught:
        function("18", None)
    assert caught.value.code == "missing_answer"


@pytest.mark.parametrize("name", ["numeric", "gsm8k"])
def test_a_gold_answer_without_a_number_is_an_error(name: str) -> None:
    function: Any = get_reward(name).function
    with pytest.raises(ContractError, match="no number in it"):
        function("18", "Paris")
