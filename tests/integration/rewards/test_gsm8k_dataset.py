"""The gsm8k reward against the published test set, where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.rewards.answer_numbers import stated_number
from workers.rewards.answer_rewards import gsm8k

DATASET = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture(scope="module")
def answers() -> list[str]:
    if not DATASET.exists():
        pytest.skip(f"no gsm8k test set at {DATASET}")
    return [json.loads(line)["answer"] for line in DATASET.read_text().splitlines()]


def test_every_gold_answer_is_right_in_each_way_of_writing_it(answers: list[str]) -> None:
    assert len(answers) == 1319
    for answer in answers:
        final = answer.rpartition("####")[2].strip()
        for response in (answer, final, f"The answer is ${final}.", rf"\boxed{{{final}}}"):
            assert gsm8k(response, answer) == 1.0, (response, answer)


def test_every_gold_answer_plus_one_is_wrong(answers: list[str]) -> None:
    for answer in answers:
        gold = stated_number(answer)
        assert gold is not None
        assert gsm8k(f"#### {float(gold) + 1}", answer) == 0.0, answer
        assert gsm8k(f"#### {-float(gold)}", answer) == float(gold == 0), answer
