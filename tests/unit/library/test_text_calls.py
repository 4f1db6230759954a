"""Calls that a server left in the text, by model family, in the shapes of their templates."""

import time

import pytest
from call_shapes import SHAPES, WEATHER
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.agents.react_agent import ReActAgent
from workers.agents.tool_agent import ToolAgent
from workers.core.call_formats import TOOL_FORMATS
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.reply_format import ReplyFormat
from workers.core.reply_parser import read_reply
from workers.core.text_calls import find_marked_calls, find_unmarked_calls
from workers.core.tool_schemas import create_openai_tool_schema
from workers.core.trajectory import StepType

TASK = {"content": "How much is 6 times 7?"}

SCHEMAS = {
    "weather": create_openai_tool_schema(
        "weather", "The weather.", {"city": {"type": "string"}, "days": {"type": "integer"}}
    ),
    "now": create_openai_tool_schema("now", "The time.", {}),
}

EVERY_SHAPE = [
    pytest.param(family, text, id=f"{family}-{number}")
    for family, texts in SHAPES.items()
    for number, text in enumerate(texts)
]
EVERY_TEXT = [text for texts in SHAPES.values() for text in texts]


def weather(city: str, days: int) -> str:
    """Forecast the weather."""
    return f"{days} days of rain in {city}"


def now() -> str:
    """Tell the time."""
    return "noon"


def agent_of(kind: str, **options):
    made = {
        "text react": lambda: ReActAgent(**options),
        "native react": lambda: ReActAgent(native_tools=True, **options),
        "tool": lambda: ToolAgent(**options),
    }[kind]()
    made.set_tools({"weather": weather, "now": now})
    return made


KINDS = ("text react", "native react", "tool")


def actions(trajectory) -> list[tuple]:
    return [(step.tool_name, step.tool_args) for step in trajectory.get_tool_calls()]


def test_every_family_has_a_shape_here():
    assert {"auto", *SHAPES} == set(TOOL_FORMATS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "text"), EVERY_SHAPE)
async def test_each_shape_is_the_same_call_for_every_agent(script, kind, family, text):
    model = script(text, "Final Answer: rain")
    trajectory = await agent_of(kind).run_trajectory(TASK, model, "r")
    assert actions(trajectory) == [("weather", WEATHER)]
    assert "3 days of rain in Hanoi" in model.requests[1][-1]["content"]
    assert trajectory.get_final_response() == "rain"


@pytest.mark.parametrize(("family", "text"), EVERY_SHAPE)
def test_a_family_chosen_by_name_reads_its_shapes(family, text):
    calls = find_marked_calls(text, SCHEMAS, family) or find_unmarked_calls(text, SCHEMAS, family)
    assert calls is not None
    assert [(call.name, call.args) for call in calls.calls] == [("weather", WEATHER)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "text"),
    # Harmony's channels are its marks of reasoning; its models write no others.
    [shape for shape in EVERY_SHAPE if shape.values[0] != "harmony"],
)
async def test_a_draft_of_a_call_in_the_reasoning_is_not_run(script, kind, family, text):
    model = script(f"<think>{text}</think>\n\nFinal Answer: 42")
    trajectory = await agent_of(kind).run_trajectory(TASK, model, "r")
    assert actions(trajectory) == []
    assert trajectory.get_final_response() == "42"
    assert trajectory.steps[-1].metadata["reasoning"].strip() == text.strip()


@pytest.mark.parametrize("text", EVERY_TEXT)
def test_a_call_after_reasoning_is_found(text):
    steps = read_reply(
        ModelResponse(f"<think>Thought: hm\nFinal Answer: 1</think>\n{text}"),
        ReplyFormat(StepType.FINAL_ANSWER, tools=SCHEMAS),
    )
    assert [(s.tool_name, s.tool_args) for s in steps if s.step_type is StepType.ACTION] == [
        ("weather", WEATHER)
    ]
    assert not any(step.step_type is StepType.FINAL_ANSWER for step in steps)


@settings(max_examples=300, deadline=None)
@given(
    text=st.sampled_from(EVERY_TEXT),
    before=st.sampled_from(["", "I look it up.\n", "Thought: I look it up.\n", "**Plan**\n\n"]),
    cut=st.floats(0.35, 1),
    after=st.sampled_from(["", "\n", "<|im_end|>", "\nObservation: sunny\nFinal Answer: sunny"]),
)
def test_no_shape_whole_or_cut_off_becomes_an_answer(text, before, cut, after):
    written = text[: max(24, int(len(text) * cut))]
    is_whole = written == text
    steps = read_reply(
        ModelResponse(before + written + (after if is_whole else "")),
        ReplyFormat(StepType.FINAL_ANSWER, tools=SCHEMAS),
    )
    answers = [step.content for step in steps if step.step_type is StepType.FINAL_ANSWER]
    if is_whole:
        # A form without marks counts only at the end; an answer with a label may follow it.
        assert answers in ([], ["sunny"])
    elif any(mark in written for mark in ("<", "[TOOL", "functools", "to=", "```tool")):
        assert answers == []


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "born": 1815}',
        '{"city": "Hanoi", "days": 3}',
        "[1, 2, 3]",
        "```python\ndef weather(city):\n    return 1\n```",
        '```json\n{"name": "other_tool", "arguments": {}}\n```',
        "print(6 * 7)",
        "It rains: use weather() to look.",
        "f(x) = x",
        "42",
    ],
)
@pytest.mark.parametrize("kind", ["native react", "tool"])
async def test_json_and_code_that_call_no_offered_tool_are_answers(script, kind, text):
    trajectory = await agent_of(kind).run_trajectory(TASK, script(text), "r")
    assert trajectory.get_final_response() == text
    assert actions(trajectory) == []


def test_text_that_is_no_call_stays_an_answer_for_an_agent_without_tools():
    (step,) = read_reply(
        ModelResponse("<tool_call>{}</tool_call>"), ReplyFormat(StepType.FINAL_ANSWER)
    )
    assert step.step_type is StepType.FINAL_ANSWER


async def test_several_calls_of_one_text_are_all_run(script):
    first = SHAPES["hermes"][0]
    second = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    model = script(f"{first}\n{second}", "rain at noon")
    trajectory = await agent_of("tool").run_trajectory(TASK, model, "r")
    assert actions(trajectory) == [("weather", WEATHER), ("now", {})]


async def test_calls_found_in_text_become_native_calls_of_the_conversation(script):
    model = script(f"I look.\n{SHAPES['hermes'][0]}", "rain")
    await agent_of("tool").run_trajectory(TASK, model, "r")
    message, result = model.requests[1][-2:]
    assert message["content"] == "I look."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Hanoi", "days": 3}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", call["id"])
    assert call["id"].isalnum()
    assert len(call["id"]) == 9


async def test_text_agents_keep_the_models_own_text(script):
    call = SHAPES["hermes"][0]
    model = script(call + "\n<tool_response>invented</tool_response>", "Final Answer: rain")
    await agent_of("text react").run_trajectory(TASK, model, "r")
    message, result = model.requests[1][-2:]
    assert message == {"role": "assistant", "content": call}
    assert result == {"role": "user", "content": "Observation: 3 days of rain in Hanoi"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>weather in Hanoi</tool_call>",
        'Sure, I call it: {"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}',
        "I use the tool now.\n```json\n"
        '{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}\n```',
        "I use the tool now.\nweather(city='Hanoi', days=3)",
    ],
)
async def test_a_lost_call_is_told_once_and_then_ends_the_trajectory(script, kind, text):
    model = script(text, text, "Final Answer: never asked")
    trajectory = await agent_of(kind).run_trajectory(TASK, model, "r")
    assert "does not count as an answer" in model.requests[1][-1]["content"]
    assert trajectory.metadata["stop_reason"] == "parse_error"
    assert trajectory.get_final_response() == ""
    assert trajectory.metadata["lost_calls"] == 2
    assert "tools" not in trajectory.metadata
    assert actions(trajectory) == []


async def test_an_answer_may_follow_a_lost_call(script):
    model = script("<tool_call>weather</tool>", "Final Answer: rain")
    trajectory = await agent_of("native react").run_trajectory(TASK, model, "r")
    assert trajectory.get_final_response() == "rain"


def test_a_call_with_broken_arguments_names_its_problem():
    (step,) = read_reply(
        ModelResponse('<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'),
        ReplyFormat(StepType.FINAL_ANSWER, tools=SCHEMAS),
    )
    assert step.step_type is StepType.ACTION
    assert "not valid JSON" in step.metadata["parse_error"]


@pytest.mark.parametrize("arguments", ["3", "[3]", '"Hanoi"', "null"])
@pytest.mark.parametrize(
    "shape",
    [
        '<tool_call>{"name": "weather", "arguments": ARGUMENTS}</tool_call>',
        "[TOOL_CALLS]weather[ARGS]ARGUMENTS",
        "<\uff5ctool\u2581call\u2581begin\uff5c>weather<\uff5ctool\u2581sep\uff5c>ARGUMENTS"
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>weather\n"
        "```json\nARGUMENTS\n```<\uff5ctool\u2581call\u2581end\uff5c>",
    ],
    ids=["hermes", "mistral", "deepseek_v3.1", "deepseek_v3"],
)
def test_arguments_that_are_no_object_are_a_problem_and_not_dropped(shape, arguments):
    (step,) = read_reply(
        ModelResponse(shape.replace("ARGUMENTS", arguments)),
        ReplyFormat(StepType.FINAL_ANSWER, tools=SCHEMAS),
    )
    assert step.step_type is not StepType.FINAL_ANSWER
    assert step.tool_args is None
    assert step.metadata.get("parse_error") or step.metadata.get("lost_call")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Hanoi", "Hanoi"),
        ("12", "12"),
        ("a\nb <c> </d>", "a\nb <c> </d>"),
        ("{'a': 1}", "{'a': 1}"),
    ],
)
def test_text_parameters_stay_text(value, expected):
    text = f"<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    (step,) = read_reply(ModelResponse(text), ReplyFormat(tools=SCHEMAS))
    assert step.tool_args == {"city": expected}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("weather", '{"city": "Hanoi", "days": 3}', WEATHER),
        ("functions.weather", '{"city": "Hanoi", "days": 3}', WEATHER),
        ("weather", '"{\\"city\\": \\"Hanoi\\", \\"days\\": 3}"', WEATHER),
        ("weather", "{'city': 'Hanoi', 'days': 3}", WEATHER),
        ("weather", "", {}),
    ],
)
def test_native_calls_are_read_as_models_write_them(name, arguments, expected):
    response = ModelResponse("", (NativeToolCall("c", name, arguments),))
    (step,) = read_reply(response, ReplyFormat(tools=SCHEMAS))
    assert (step.tool_name, step.tool_args) == ("weather", expected)
    assert step.metadata["chat_message"]["tool_calls"][0]["function"]["name"] == name


@pytest.mark.parametrize(
    "text",
    [
        'Action: {"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}',
        'Action:\n```\n{"action": "weather", "action_input": {"city": "Hanoi", "days": 3}}\n```',
        "Action: functions.weather(city='Hanoi', days=3)",
        f"Thought: I look.\nAction: {SHAPES['hermes'][0]}",
        'Thought: I look.\n{"name": "weather", "arguments": {"city": "Hanoi", "days": 3}}',
    ],
)
def test_labels_may_introduce_a_call_of_another_format(text):
    steps = read_reply(ModelResponse(text), ReplyFormat(tools=SCHEMAS))
    assert (steps[-1].tool_name, steps[-1].tool_args) == ("weather", WEATHER)


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"tool_format is 'hermess'; it must be one of auto, he"):
        ToolAgent(tool_format="hermess")


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "<function=", "[TOOL_CALLS]", "{", "[", "```\n", "<think>", "to=functions.a ",
     '{"name": "weather", ', "weather(\n", "<parameter=a>", "<|channel|>", "<arg_key>"],
)  # fmt: skip
def test_long_and_hostile_texts_are_read_quickly(piece):
    started = time.process_time()
    read_reply(ModelResponse(piece * (60_000 // len(piece))), ReplyFormat(tools=SCHEMAS))
    assert time.process_time() - started < 5


@settings(max_examples=300, deadline=None)
@given(st.text() | st.lists(st.sampled_from([*EVERY_TEXT, "<think>", "</think>", "{", "("])))
def test_no_text_raises(text):
    read_reply(ModelResponse("".join(text)), ReplyFormat(tools=SCHEMAS))
