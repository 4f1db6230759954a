"""Read a model's reply into trajectory steps, whichever format it comes in.

The formats are native OpenAI tool calls; calls that the server left in the text (`text_calls`); and
text with the labels `Thought:`, `Action: name(k=v)` (or `Action Input:` on the next line),
`TOOL_CALL: name(k=v)` and `Final Answer:`. Reasoning is recorded and never read. Used by every
agent. Must not: raise for any text of a model; a bad call becomes a step with `parse_error`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from workers.core.call_formats import ANY_MARK, Tools, tool_name
from workers.core.call_parser import CallParseError, parse_json_arguments
from workers.core.labelled_text import label_kinds, labelled_steps, without_label
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.reasoning import Output, split_reasoning
from workers.core.reply_format import ReplyFormat
from workers.core.text_calls import (
    TextCall,
    TextCalls,
    find_marked_calls,
    find_unmarked_calls,
)
from workers.core.trajectory import StepType, TrajectoryStep

_PLAIN = ReplyFormat()
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
    response: ModelResponse, form: ReplyFormat = _PLAIN, *, prompt_chars: int = 0
) -> list[TrajectoryStep]:
    """Return the steps of one reply, in order; at least one.

    The first step carries the message, the tokens and the usage of the whole reply. A text reply
    that invents an observation after its action is cut there, in its message, too. A text that
    looks like a call and is none is a thought with the metadata `lost_call`.

    Args:
        response: The model's reply.
        form: How the agent reads its replies.
        prompt_chars: Length of the messages sent, to estimate tokens if the server gave no usage.
    """
    output = split_reasoning(response.text)
    message, steps = _message_and_steps(response, output, form)
    for step in steps:
        step.metadata.pop("end", None)
        step.metadata["chat_message"] = None
    _record_reply(steps[0], response, output, message, prompt_chars)
    return steps


def first_step_of(response: ModelResponse, form: ReplyFormat = _PLAIN) -> TrajectoryStep:
    """Return one step for the whole reply: its first call or answer, else its first text.

    The message is cut after the first call, because further calls are not run.
    """
    if len(response.tool_calls) > 1:
        response = replace(response, tool_calls=response.tool_calls[:1])
    output = split_reasoning(response.text)
    message, steps = _message_and_steps(response, output, form)
    decisive = (StepType.ACTION, StepType.FINAL_ANSWER)
    step = next((step for step in steps if step.step_type in decisive), steps[0])
    if (end := step.metadata.pop("end", None)) is not None:
        message["content"] = message["content"][:end].rstrip()
    if step.step_type is not StepType.FINAL_ANSWER:
        step.content = message["content"] or step.content
    _record_reply(step, response, output, message, prompt_chars=0)
    return step


def whole_reply(response: ModelResponse, prompt_chars: int = 0) -> TrajectoryStep:
    """Return the reply's whole output, with its labels, as a final answer."""
    output = split_reasoning(response.text)
    content = output.text.strip() if output.reasoning else output.text
    step = TrajectoryStep(StepType.FINAL_ANSWER, content)
    _record_reply(step, response, output, response.to_message(), prompt_chars)
    return step


def estimate_tokens(chars: int) -> int:
    """Estimate the tokens of a text from its length."""
    return -(-chars // _CHARS_PER_TOKEN)


def _message_and_steps(
    response: ModelResponse, output: Output, form: ReplyFormat
) -> tuple[dict[str, Any], list[TrajectoryStep]]:
    if response.tool_calls:
        return response.to_message(), list(_native_steps(response, output, form.tools))
    calls, lost = _calls_in_text(output.text, form)
    if calls is not None:
        return _text_call_steps(response, output, calls, form)
    end, steps = labelled_steps(output.text, form)
    for step in steps:
        if "end" in step.metadata:
            step.metadata["end"] = output.origin(step.metadata["end"])
    if lost is not None:
        steps = [TrajectoryStep(StepType.THOUGHT, output.text.strip(), {"lost_call": lost})]
    if not steps:
        problem = "the reply has only reasoning" if output.reasoning else "the reply was empty"
        steps = [TrajectoryStep(StepType.THOUGHT, "", {"parse_error": problem})]
    is_cut = end < len(output.text)
    kept = response.text[: output.origin(end)] if is_cut else response.text
    return {"role": "assistant", "content": kept}, steps


def _calls_in_text(text: str, form: ReplyFormat) -> tuple[TextCalls | None, str | None]:
    """Return the calls in the text, or the sign of a call that could not be read."""
    if not form.tools:
        return None, None
    if calls := find_marked_calls(text, form.tools, form.tool_format):
        return calls, None
    if label_kinds(text) - {"thought"}:
        return None, None
    if mark := ANY_MARK.search(text):
        return None, f"it contains {mark.group()!r}, and no call follows that could be read"
    calls = find_unmarked_calls(text, form.tools, form.tool_format)
    if calls is None:
        return None, None
    before = text[: calls.start].strip()
    if without_label(before) != before or not before:
        return calls, None
    return None, f"it ends with {_shorten(calls.calls[0].written)}, with other text before it"


def _text_call_steps(
    response: ModelResponse, output: Output, calls: TextCalls, form: ReplyFormat
) -> tuple[dict[str, Any], list[TrajectoryStep]]:
    """Return the message and the steps of a reply with calls in its text."""
    before = replace(form, unlabelled=StepType.THOUGHT)
    _, steps = labelled_steps(output.text[: calls.start], before)
    steps = [step for step in steps if step.step_type is StepType.THOUGHT]
    actions = [_text_call_step(call, output) for call in calls.calls]
    end = output.origin(calls.calls[-1].end)
    message: dict[str, Any] = {"role": "assistant", "content": response.text[:end].rstrip()}
    if form.native_tools and not any("parse_error" in action.metadata for action in actions):
        message["content"] = response.text[: output.origin(calls.start)].rstrip()
        for number, action in enumerate(actions):
            action.metadata["tool_call_id"] = _call_id(response, number)
            del action.metadata["end"]
        message |= response.metadata.get("reasoning_fields", {})
        message["tool_calls"] = [_as_native(action).to_openai() for action in actions]
    return message, steps + actions


def _text_call_step(call: TextCall, output: Output) -> TrajectoryStep:
    metadata: dict[str, Any] = {"end": output.origin(call.end)}
    if call.problem is not None:
        metadata["parse_error"] = call.problem
    return TrajectoryStep(
        StepType.ACTION, call.written, metadata, tool_name=call.name, tool_args=call.args
    )


def _as_native(action: TrajectoryStep) -> NativeToolCall:
    arguments = json.dumps(action.tool_args, ensure_ascii=False)
    return NativeToolCall(action.metadata["tool_call_id"], action.tool_name or "", arguments)


def _call_id(response: ModelResponse, number: int) -> str:
    """Return an id of nine letters and digits, the only form that Mistral's templates accept."""
    written = f"{response.response_id}/{response.text}/{number}"
    return hashlib.sha256(written.encode("utf-8", "replace")).hexdigest()[:9]


def _record_reply(
    step: TrajectoryStep,
    response: ModelResponse,
    output: Output,
    message: dict[str, Any],
    prompt_chars: int,
) -> None:
    """Record the reply's message, reasoning, tokens and usage in the step."""
    step.metadata |= {"chat_message": message, "usage": _usage(response, prompt_chars)}
    reasoning = (response.metadata.get("reasoning"), output.reasoning)
    if any(reasoning):
        step.metadata["reasoning"] = "\n\n".join(filter(None, reasoning))
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


def _native_steps(
    response: ModelResponse, output: Output, tools: Tools
) -> Iterator[TrajectoryStep]:
    text = output.text.strip()
    if text:
        yield TrajectoryStep(StepType.THOUGHT, without_label(text))
    for call in response.tool_calls:
        yield _native_step(call, tools)


def _native_step(call: NativeToolCall, tools: Tools) -> TrajectoryStep:
    step = TrajectoryStep(
        StepType.ACTION,
        f"{call.name}({call.arguments})",
        {"tool_call_id": call.id},
        tool_name=tool_name(call.name, tools),
        tool_args={},
    )
    try:
        step.tool_args = parse_json_arguments(call.arguments)
    except CallParseError as error:
        step.metadata["parse_error"] = str(error)
    return step


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
