import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.core.model_response import ModelResponse, NativeToolCall, as_model_response
from workers.core.reply_format import ReplyFormat
from workers.core.reply_parser import first_step_of, read_reply
from workers.core.tool_schemas import create_openai_tool_schema
from workers.core.trajectory import StepType


def parts(text: str, **options) -> list[tuple[str, str]]:
    steps = read_reply(ModelResponse(text), ReplyFormat(**options))
    return [(step.step_type.value, step.content) for step in steps]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text", [("thought", "just text")]),
        ("Thought: a\nstill a", [("thought", "a\nstill a")]),
        ("Thought: a\n\nFinal Answer: b\nc", [("thought", "a"), ("final_answer", "b\nc")]),
        ("so\nAction: f(a=1)", [("thought", "so"), ("action", "f(a=1)")]),
        ("**Thought:** a\n**Action:** f()", [("thought", "a"), ("action", "f()")]),
        ("### Final Answer: 3", [("final_answer", "3")]),
        ("Thought 1: a\nAction 1: f()", [("thought", "a"), ("action", "f()")]),
        ("THOUGHT: a\nfinal_answer: 3", [("thought", "a"), ("final_answer", "3")]),
        ("Thought: I add. Action: f(a=1)", [("thought", "I add."), ("action", "f(a=1)")]),
        ("Action: `f(a=1)`", [("action", "f(a=1)")]),
        ("Action:\n```python\nf(a=1)\n```", [("action", "f(a=1)")]),
        ("TOOL_CALL: f(a=1)\nTOOL_CALL: g()", [("action", "f(a=1)"), ("action", "g()")]),
        ("Action: f(a='x\nFinal Answer: no')", [("action", "f(a='x\nFinal Answer: no')")]),
        ("Action: f()\nObservation: 3\nFinal Answer: 3", [("action", "f()")]),
        ("Final Answer: 1\nThought: more", [("final_answer", "1")]),
        ("my final answer is: 3", [("thought", "my final answer is: 3")]),
    ],
)
def test_text_is_split_at_its_labels(text, expected):
    assert parts(text) == expected


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ('Action: f\nAction Input: {"a": 1}', {"a": 1}),
        ('Action: f\nAction Input: ```json\n{"a": 1}\n```', {"a": 1}),
        ("Action: f\nAction Input: two words\nObservation: x", {"a": "two words"}),
        ("Action: f\nAction Input:", {}),
        ('Action: f({"a": [1, 2]})', {"a": [1, 2]}),
        ("Action: f(5)", {"a": 5}),
    ],
)
def test_every_way_to_write_a_call_is_read(text, args):
    tools = {"f": create_openai_tool_schema("f", "", {"a": {}})}
    (step,) = read_reply(ModelResponse(text), ReplyFormat(tools=tools))
    assert (step.tool_name, step.tool_args) == ("f", args)


@pytest.mark.parametrize(
    "text",
    [
        "Action: Final Answer: 42",
        "Thought: I know it.\nAction: Final Answer: 42",
        "**Action:** **Final Answer:** 42",
        "Action: final_answer: 42",
        "Action:\nFinal Answer: 42",
        "Action: Final Answer\nAction Input: 42",
    ],
)
@pytest.mark.parametrize("tools", [{}, {"f": create_openai_tool_schema("f", "", {})}])
def test_an_answer_written_as_an_action_is_an_answer(text, tools):
    steps = read_reply(ModelResponse(text), ReplyFormat(tools=tools))
    assert (steps[-1].step_type, steps[-1].content) == (StepType.FINAL_ANSWER, "42")
    assert not any(step.step_type is StepType.ACTION for step in steps)


@pytest.mark.parametrize("text", ["Action: f(", "Action: none", "Action:", "Action: f(a=x)"])
def test_a_call_that_cannot_be_read_is_an_action_with_its_problem(text):
    (step,) = read_reply(ModelResponse(text))
    assert step.step_type is StepType.ACTION
    assert step.tool_name is None
    assert step.metadata["parse_error"]


def test_the_first_step_stands_for_the_message_and_its_tokens():
    response = ModelResponse(
        "Thought: a\nAction: f()",
        prompt_tokens=7,
        completion_tokens=5,
        finish_reason="stop",
        logprobs=[-0.1, -0.2],
        completion_token_ids=[4, 5],
    )
    first, second = read_reply(response)
    assert first.metadata == {
        "chat_message": {"role": "assistant", "content": "Thought: a\nAction: f()"},
        "usage": {"prompt_tokens": 7, "completion_tokens": 5},
        "finish_reason": "stop",
        "completion_token_ids": [4, 5],
    }
    assert first.log_probs == [-0.1, -0.2]
    assert second.metadata == {"chat_message": None}


def test_tokens_without_usage_are_an_estimate_that_says_so():
    (step,) = read_reply(ModelResponse("x" * 8), prompt_chars=17)
    assert step.metadata["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "estimated": True,
    }


def test_one_step_for_a_whole_reply_is_its_first_call_or_answer():
    step = first_step_of(ModelResponse("Thought: a\nAction: f(a=1)\nAction: g()"))
    assert (step.step_type, step.tool_name) == (StepType.ACTION, "f")
    assert step.content == "Thought: a\nAction: f(a=1)"
    assert step.to_message() == step.metadata["chat_message"]
    answer = first_step_of(ModelResponse("Thought: a\nFinal Answer: 3"))
    assert (answer.step_type, answer.content) == (StepType.FINAL_ANSWER, "3")
    plain = first_step_of(ModelResponse("hm"))
    assert (plain.step_type, plain.content) == (StepType.THOUGHT, "hm")


def test_one_step_of_several_native_calls_keeps_the_one_that_is_run():
    native = (NativeToolCall("1", "f", '{"a": 1}'), NativeToolCall("2", "g", "{}"))
    step = first_step_of(ModelResponse("", native))
    assert (step.tool_name, step.tool_args) == ("f", {"a": 1})
    assert [call["id"] for call in step.metadata["chat_message"]["tool_calls"]] == ["1"]


PIECES = ["Thought:", "Action:", "Action Input:", "Observation:", "Final Answer:", "f(", ")"]
PIECES += ["a=1", "'", '"', "{", "}", "\n", " ", "**", "x.", "TOOL_CALL:", "```"]


@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(PIECES),
        max_size=20,
    ).map("".join)
)
@settings(max_examples=400, deadline=None)
def test_no_text_makes_it_raise_and_every_reply_has_a_step(text):
    steps = read_reply(ModelResponse(text))
    assert steps
    assert steps[0].metadata["chat_message"]["role"] == "assistant"
    assert first_step_of(ModelResponse(text)).content is not None


@pytest.mark.parametrize(
    "text",
    [
        " " * 200_000,
        "*" * 200_000,
        "Action: " * 20_000,
        "Thought:" + "." * 200_000,
        "Action: f(" + "'x'," * 40_000,
        "Action: f\nAction Input: " * 5_000,
    ],
)
def test_a_long_reply_is_read_in_bounded_time(text):
    started = time.thread_time()
    read_reply(ModelResponse(text))
    assert time.thread_time() - started < 2


def test_what_a_models_client_may_return_is_accepted():
    class WithText:
        text = "hi"
        tool_calls = None

    assert as_model_response("hi").text == "hi"
    assert as_model_response({"content": None}).text == ""
    assert as_model_response(WithText()).text == "hi"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    native = as_model_response({"content": "x", "tool_calls": [call]})
    assert native.tool_calls == (NativeToolCall("1", "f", "{}"),)
    with pytest.raises(TypeError, match="returned NoneType"):
        as_model_response(None)
