from __future__ import annotations

import json
from typing import Any

import pytest

from workers.offline_policy.answer_key import AnswerKey, key_entry
from workers.offline_policy.draws import Mishap
from workers.offline_policy.rules import DO_NOT_KNOW, Reply, read_task, reply_to
from workers.offline_policy.tokens import completion_token_ids, prompt_token_ids

QUESTION = "What is 12 * (3 + 4)?"
REACT = (
    "You have these tools:\n- calculator(expression: string): computes\n"
    "Write Thought:, Action: tool(a=1), and in the end Final Answer: the result"
)
TOOL_LINE = "Tools:\n- calculator(expression: string)\nTOOL_CALL: tool_name(a=1)"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object",
            "properties": {"operation": {"type": "string"}, "expression": {"type": "string"}},
        },
    },
}
FINISH = {
    "type": "function",
    "function": {"name": "finish", "parameters": {"properties": {"status": {}, "answer": {}}}},
}
KEY = AnswerKey(
    [
        key_entry("How many eggs?", "9 * 2 = $<<9*2=18>>18\n#### 18"),
        key_entry("How many eggs? In all?", "#### 1,450"),
        key_entry("Capital?", "Paris"),
    ]
)


def reply(
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    key: AnswerKey | None = None,
    is_wrong: bool = False,
    mishap: Mishap | None = None,
) -> Reply:
    task = read_task(messages, tools, key)
    return reply_to(task, seed=1, sample_key=0, is_wrong=is_wrong, mishap=mishap)


def chat(question: str = QUESTION, system: str | None = None) -> list[dict[str, Any]]:
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": question}]


def test_the_react_protocol_is_a_call_then_the_answer() -> None:
    messages = chat(system=REACT)
    first = reply(messages).text
    assert first.endswith("Action: calculator(expression='12 * (3 + 4)')")
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Observation: 84"},
    ]
    assert reply(messages).text.endswith("Final Answer: 84")


def test_native_tools_are_called_natively_then_the_answer_is_plain() -> None:
    messages = chat()
    first = reply(messages, tools=[CALCULATOR])
    assert first.tool_name == "calculator"
    assert json.loads(first.tool_arguments) == {"expression": "12 * (3 + 4)"}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "84"},
    ]
    assert reply(messages, tools=[CALCULATOR]) == Reply("84")


def test_a_finish_tool_takes_the_answer() -> None:
    messages = [*chat(), {"role": "assistant", "content": ""}, {"role": "tool", "content": "84"}]
    last = reply(messages, tools=[CALCULATOR, FINISH])
    assert (last.tool_name, last.tool_arguments) == ("finish", '{"answer":"84"}')


def test_tool_lines_are_written_where_they_are_asked_for() -> None:
    messages = chat(system=TOOL_LINE)
    assert reply(messages).text == "TOOL_CALL: calculator(expression='12 * (3 + 4)')"
    messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "84"}]
    assert reply(messages).text == "84"


def test_a_single_question_is_answered_at_once() -> None:
    assert reply(chat()).text == "12 * (3 + 4) = 84"
    assert reply(chat(system="Write your result after 'Final Answer:'")).text == "Final Answer: 84"
    assert reply(chat("Who are you?")).text == DO_NOT_KNOW


@pytest.mark.parametrize("wrap", ["{}", "Question: {}\nThink."])
def test_a_keyed_question_gets_its_gold_number(wrap: str) -> None:
    assert reply(chat(wrap.format("How many eggs?")), key=KEY).text.endswith("#### 18")
    assert reply(chat(wrap.format("How many eggs? In all?")), key=KEY).text.endswith("#### 1,450")
    assert reply(chat(wrap.format("Capital?")), key=KEY).text == "Paris"


def test_a_keyed_question_is_computed_by_its_own_last_calculation() -> None:
    first = reply(chat("How many eggs?", REACT), key=KEY).text
    assert first.endswith("Action: calculator(expression='9*2')")


def test_decisions_about_a_keyed_prompt_are_made_from_the_files_text() -> None:
    for messages in (chat("How many eggs?"), chat("Q: How many eggs? A:", REACT)):
        assert read_task(messages, None, KEY).prompt_text == "How many eggs?"


@pytest.mark.parametrize("question", [QUESTION, "How many eggs?"])
def test_a_wrong_answer_is_another_number(question: str) -> None:
    right = reply(chat(question), key=KEY).text.split()[-1]
    wrong = reply(chat(question), key=KEY, is_wrong=True).text.split()[-1]
    assert 1 <= int(wrong) - int(right) <= 9
    assert reply(chat("Capital?"), key=KEY, is_wrong=True).text == DO_NOT_KNOW


@pytest.mark.parametrize("mishap", [Mishap.MALFORMED_CALL, Mishap.TOOL_ERROR, Mishap.BAD_OUTPUT])
def test_after_a_mishap_in_the_first_turn_the_conversation_goes_on(mishap: Mishap) -> None:
    messages = chat(system=REACT)
    first = reply(messages, mishap=mishap).text
    assert "12 * (3 + 4)')" not in first
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Error"}]
    assert reply(messages, mishap=mishap).text.endswith("calculator(expression='12 * (3 + 4)')")
    messages += [{"role": "assistant", "content": "Action"}, {"role": "user", "content": "84"}]
    assert reply(messages, mishap=mishap).text.endswith("Final Answer: 84")


def test_a_malformed_native_call_does_not_parse() -> None:
    first = reply(chat(), tools=[CALCULATOR], mishap=Mishap.MALFORMED_CALL)
    with pytest.raises(json.JSONDecodeError):
        json.loads(first.tool_arguments)


def test_the_next_prompt_begins_with_prompt_and_completion() -> None:
    messages = chat(system=REACT)
    answer = reply(messages)
    before = prompt_token_ids(messages, None) + completion_token_ids(answer)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "84"}]
    assert prompt_token_ids(messages, None)[: len(before)] == before


def test_that_holds_for_native_calls_too() -> None:
    messages = chat()
    call = reply(messages, tools=[CALCULATOR])
    before = prompt_token_ids(messages, [CALCULATOR]) + completion_token_ids(call)
    function = {"name": call.tool_name, "arguments": call.tool_arguments}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "84"},
    ]
    assert prompt_token_ids(messages, [CALCULATOR])[: len(before)] == before
