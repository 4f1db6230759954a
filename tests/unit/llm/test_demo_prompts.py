from __future__ import annotations

from producers.demo_prompts import demo_prompts
from workers.offline_policy.arithmetic import compute, find_expression, write_number


def test_prompts_are_different_and_the_same_for_the_same_seed() -> None:
    prompts = demo_prompts()
    assert len({prompt["question"] for prompt in prompts}) == 64
    assert prompts == demo_prompts(64, 0)
    assert prompts != demo_prompts(64, 1)
    assert demo_prompts(8) == prompts[:8]


def test_every_answer_is_what_its_question_asks() -> None:
    for prompt in demo_prompts(300, 7):
        expression = find_expression(prompt["question"])
        assert expression is not None
        assert write_number(compute(expression)) == prompt["answer"]
