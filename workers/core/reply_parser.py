"""Read a model's reply into trajectory steps, whichever format it comes in.

The formats are native OpenAI tool calls, and text with the labels `Thought:`, `Action: name(k=v)`
(or `Action Input:` on the next line), `TOOL_CALL: name(k=v)` and `Final Answer:`. Used by every
agent. Must not: raise for any text of a model; a bad call becomes a step with `parse_error`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from workers.core.call_parser import (
    CallParseError,
    ParsedCall,
    find_call_end,
    parse_call,
    parse_json_arguments,
)
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.trajectory import StepType, TrajectoryStep

ParameterNames = Callable[[str], Sequence[str]]

# At the beginning of a line, or after a sentence, since small models write all labels on one line.
_LABEL = re.compile(
    r"(?:^[ \t]{0,8}[*#>_`-]{0,4}[ \t]{0,4}|(?<=[.!?])[ \t]{1,4})"
    r"(Thought|Action Input|Action|Observation|Final[ _]Answer|TOOL_CALL)"
    r"(?:[ \t]\d{1,3})?[*_]{0,3}[ \t]{0,4}:[*_]{0,3}[ \t]{0,4}",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"\s*(?:```\w*|`)?\s*")
_CHARS_PER_TOKEN = 4
_RECORDED_FIELDS = (
    "finish_reason",
    "model",
    "response_id",
    "prompt_token_ids",
    "completion_token_ids",
    "policy_version",
)


def read_reply(
    response: ModelResponse,
    *,
    unlabelled: StepType = StepType.THOUGHT,
    parameter_names: ParameterNames = lambda _: (),
    prompt_chars: int = 0,
) -> list[TrajectoryStep]:
    """Return the steps of one reply, in order; at least one.

    The first step carries the message, the tokens and the usage of the whole reply. A text reply
    that invents an observation after its action is cut there, in its message, too.

    Args:
        response: The model's reply.
        unlabelled: Kind of step for a text without labels.
        parameter_names: A tool's parameters in order, for values without a name.
        prompt_chars: Length of the messages sent, to estimate tokens if the server gave no usage.
    """
    message, steps = _message_and_steps(response, unlabelled, parameter_names)
    for step in steps:
        step.metadata.pop("end", None)
        step.metadata["chat_message"] = None
    _record_reply(steps[0], response, message, prompt_chars)
    return steps


def first_step_of(
    response: ModelResponse, parameter_names: ParameterNames = lambda _: ()
) -> TrajectoryStep:
    """Return one step for the whole reply: its first call or answer, else its first text.

    The message is cut after the first call, because further calls are not run.
    """
    if len(response.tool_calls) > 1:
        response = replace(response, tool_calls=response.tool_calls[:1])
    message, steps = _message_and_steps(response, StepType.THOUGHT, parameter_names)
    decisive = (StepType.ACTION, StepType.FINAL_ANSWER)
    step = next((step for step in steps if step.step_type in decisive), steps[0])
    if (end := step.metadata.pop("end", None)) is not None:
        message["content"] = message["content"][:end].rstrip()
    if step.step_type is not StepType.FINAL_ANSWER:
        step.content = message["content"] or step.content
    _record_reply(step, response, message, prompt_chars=0)
    return step


def whole_reply(response: ModelResponse, prompt_chars: int = 0) -> TrajectoryStep:
    """Return the reply's whole text, with its labels, as a final answer."""
    step = TrajectoryStep(StepType.FINAL_ANSWER, response.text)
    _record_reply(step, response, response.to_message(), prompt_chars)
    return step


def estimate_tokens(chars: int) -> int:
    """Estimate the tokens of a text from its length."""
    return -(-chars // _CHARS_PER_TOKEN)


def _message_and_steps(
    response: ModelResponse, unlabelled: StepType, parameter_names: ParameterNames
) -> tuple[dict[str, Any], list[TrajectoryStep]]:
    if response.tool_calls:
        return response.to_message(), list(_native_steps(response))
    kept, steps = _text_steps(response.text, unlabelled, parameter_names)
    if not steps:
        steps = [TrajectoryStep(StepType.THOUGHT, "", {"parse_error": "the reply was empty"})]
    return {"role": "assistant", "content": kept}, steps


def _record_reply(
    step: TrajectoryStep, response: ModelResponse, message: dict[str, Any], prompt_chars: int
) -> None:
    """Record the reply's message, tokens and usage in the step."""
    step.metadata |= {"chat_message": message, "usage": _usage(response, prompt_chars)}
    for name in _RECORDED_FIELDS:
        if (value := getattr(response, name)) is not None:
            step.metadata[name] = value
    step.log_probs = response.logprobs


def _usage(response: ModelResponse, prompt_chars: int) -> dict[str, Any]:
    prompt, completion = response.prompt_tokens, response.completion_tokens
    if prompt is not None and completion is not None:
        return {"prompt_tokens": prompt, "completion_tokens": completion}
    written = len(response.text) + sum(len(call.arguments) for call in response.tool_calls)
    return {
        "prompt_tokens": estimate_tokens(prompt_chars) if prompt is None else prompt,
        "completion_tokens": estimate_tokens(written) if completion is None else completion,
        "estimated": True,
    }


def _native_steps(response: ModelResponse) -> Iterator[TrajectoryStep]:
    text = response.text.strip()
    if text:
        label = _LABEL.match(text)
        yield TrajectoryStep(StepType.THOUGHT, text[label.end() :].strip() if label else text)
    for call in response.tool_calls:
        yield _native_step(call)


def _native_step(call: NativeToolCall) -> TrajectoryStep:
    step = TrajectoryStep(
        StepType.ACTION,
        f"{call.name}({call.arguments})",
        {"tool_call_id": call.id},
        tool_name=call.name,
        tool_args={},
    )
    try:
        step.tool_args = parse_json_arguments(call.arguments)
    except CallParseError as error:
        step.metadata["parse_error"] = str(error)
    return step


def _text_steps(
    text: str, unlabelled: StepType, parameter_names: ParameterNames
) -> tuple[str, list[TrajectoryStep]]:
    """Return the part of the text that the conversation keeps, and its steps."""
    steps: list[TrajectoryStep] = []
    label = _LABEL.search(text)
    before = text[: label.start()] if label else text
    if before.strip():
        kind = StepType.THOUGHT if label else unlabelled
        steps.append(TrajectoryStep(kind, before.strip()))
    has_acted = False
    while label:
        kind, start = _kind_of(label), label.end()
        if kind == "observation" and has_acted:
            return text[: label.start()].rstrip(), steps
        if kind == "action":
            step, start = _action_step(text, start, parameter_names)
            steps.append(step)
            has_acted = True
            label = _LABEL.search(text, start)
            continue
        following = _LABEL.search(text, start)
        content = text[start : following.start() if following else len(text)].strip()
        if kind == "final":
            steps.append(TrajectoryStep(StepType.FINAL_ANSWER, content))
            return text, steps
        if content:
            steps.append(TrajectoryStep(StepType.THOUGHT, content))
        label = following
    return text, steps


def _kind_of(label: re.Match[str]) -> str:
    word = label.group(1).lower()
    if word in ("action", "tool_call"):
        return "action"
    return "final" if word.startswith("final") else word


def _action_step(
    text: str, start: int, parameter_names: ParameterNames
) -> tuple[TrajectoryStep, int]:
    """Return the step of the call that begins at `start`, and where it ends."""
    fence = _FENCE.match(text, start)
    begin = fence.end() if fence else start
    try:
        call, end = _call_at(text, begin)
        call = call.bind(parameter_names(call.name))
    except CallParseError as error:
        following = _LABEL.search(text, start)
        end = following.start() if following else len(text)
        step = TrajectoryStep(
            StepType.ACTION, text[start:end].strip(), {"parse_error": str(error), "end": end}
        )
        return step, end
    step = TrajectoryStep(
        StepType.ACTION,
        text[begin:end].strip(),
        {"end": end},
        tool_name=call.name,
        tool_args=call.args,
    )
    return step, end


def _call_at(text: str, begin: int) -> tuple[ParsedCall, int]:
    line_end = text.find("\n", begin)
    line = text[begin : line_end if line_end >= 0 else len(text)]
    following = _LABEL.match(text, line_end + 1) if line_end >= 0 else None
    has_input = following is not None and following.group(1).lower() == "action input"
    if has_input and following and "(" not in line:
        return _call_with_input(line.strip(" \t`*"), text, following.end())
    end = find_call_end(text, begin)
    return parse_call(text[begin:end]), end


def _call_with_input(name: str, text: str, start: int) -> tuple[ParsedCall, int]:
    """Read the two-line form: a name, then `Action Input:` with JSON or one plain value."""
    if not re.fullmatch(r"[\w.\-]{1,100}", name):
        raise CallParseError("after 'Action:' write the tool's name")
    following = _LABEL.search(text, start)
    end = following.start() if following else len(text)
    value = text[start:end].strip().removesuffix("```").removesuffix("`").strip()
    fence = _FENCE.match(value)
    value = value[fence.end() :] if fence else value
    if value.startswith("{"):
        return ParsedCall(name, parse_json_arguments(value)), end
    if not value or value == "()":
        return ParsedCall(name, {}), end
    return ParsedCall(name, {}, (value.strip("\"'"),)), end
