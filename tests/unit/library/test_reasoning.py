"""Reasoning is kept beside the reply and never read as labels, calls or answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.agents.react_agent import ReActAgent
from workers.agents.single_turn_agent import SingleTurnAgent
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.reasoning import split_reasoning
from workers.core.reply_format import ReplyFormat
from workers.core.reply_parser import first_step_of, read_reply
from workers.core.trajectory import StepType


@pytest.mark.parametrize(
    ("reply", "output", "reasoning"),
    [
        ("<think>a</think>b", "b", "a"),
        ("<think>\na\n</think>\n\nb", "\n\nb", "a"),
        ("a</think>b", "b", "a"),
        ("<think>a", "", "a"),
        ("b<think>a</think>c<think>d</think>", "bc", "a\n\nd"),
        ("[THINK]a[/THINK]b", "b", "a"),
        ("<seed:think>a</seed:think>b", "b", "a"),
        ("\u25c1think\u25b7a\u25c1/think\u25b7b", "b", "a"),
        ("<|START_THINKING|>a<|END_THINKING|>b", "b", "a"),
        ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "b", "a"),
        ("b<|im_end|>", "b", ""),
        ("<|channel|>final<|message|>b<|return|>", "b", ""),
        ("analysisaassistantfinalb", "b", "a"),
        ("b", "b", ""),
        ("analysis of the data", "analysis of the data", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_reasoning_and_output_are_told_apart(reply, output, reasoning):
    found = split_reasoning(reply)
    assert (found.text, found.reasoning) == (output, reasoning)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "b\n", "[THINK]", "[/THINK]"])))
def test_each_end_in_the_output_has_its_place_in_the_reply(parts):
    reply = "".join(parts)
    found = split_reasoning(reply)
    for end in range(1, len(found.text) + 1):
        assert reply[found.origin(end) - 1] == found.text[end - 1]


def test_labels_inside_the_reasoning_are_not_followed():
    reply = "<think>Action: f(a=1)\nFinal Answer: 1</think>\nFinal Answer: 2"
    (step,) = read_reply(ModelResponse(reply))
    assert (step.step_type, step.content) == (StepType.FINAL_ANSWER, "2")
    assert step.metadata["reasoning"] == "Action: f(a=1)\nFinal Answer: 1"
    assert step.metadata["chat_message"]["content"] == reply


def test_a_reply_cut_off_in_its_reasoning_is_no_answer():
    (step,) = read_reply(ModelResponse("<think>I guess 7"), ReplyFormat(StepType.FINAL_ANSWER))
    assert step.step_type is StepType.THOUGHT
    assert step.metadata["parse_error"] == "the reply has only reasoning"


def test_a_message_is_cut_at_its_place_behind_the_reasoning():
    reply = "<think>x</think>Action: f()\nObservation: 3\nFinal Answer: 3"
    (step,) = read_reply(ModelResponse(reply))
    assert step.metadata["chat_message"]["content"] == "<think>x</think>Action: f()"
    first = first_step_of(ModelResponse("<think>x</think>Action: f(a=1)\nAction: g()"))
    assert first.metadata["chat_message"]["content"] == "<think>x</think>Action: f(a=1)"


async def test_a_single_turn_answer_is_the_output_without_its_reasoning(script):
    trajectory = await SingleTurnAgent().run_trajectory(
        {"content": "q"}, script("<think>maybe 41</think>\n42"), "r"
    )
    assert trajectory.get_final_response() == "42"
    assert trajectory.steps[-1].metadata["reasoning"] == "maybe 41"


async def test_reasoning_fields_go_back_with_calls_and_not_with_answers(script):
    fields = {"reasoning_content": "I need f."}
    metadata = {"reasoning": "I need f.", "reasoning_fields": fields}
    call = ModelResponse("", (NativeToolCall("c", "f", "{}"),), metadata=metadata)
    model = script(call, ModelResponse("Final Answer: 1", metadata=metadata))
    agent = ReActAgent(native_tools=True, require_thought_before_action=True)
    agent.set_tools({"f": lambda: "1"})
    trajectory = await agent.run_trajectory({"content": "q"}, model, "r")
    sent = [m for m in model.requests[1] if m["role"] == "assistant"]
    assert [m.get("reasoning_content") for m in sent] == ["I need f."]
    assert "reasoning_content" not in trajectory.get_messages()[-1]
    assert [s.metadata["reasoning"] for s in trajectory.steps if "reasoning" in s.metadata] == [
        "I need f."
    ] * 2
