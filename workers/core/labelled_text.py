"""Read a text with labels: `Thought:`, `Action: name(k=v)`, `TOOL_CALL:` and `Final Answer:`.

Used by `reply_parser` for the text protocol of the agents. Must not: raise for any text of a model;
a call that cannot be read becomes a step with `parse_error`.
"""

from __future__ import annotations

import re

from workers.core.call_formats import bound_call, calls_in_json
from workers.core.call_parser import (
    CallParseError,
    ParsedCall,
    find_call_end,
    parse_call,
    parse_json_arguments,
    parse_value,
)
from workers.core.reply_format import ReplyFormat
from workers.core.trajectory import StepType, TrajectoryStep

# At the beginning of a line, or after a sentence, since small models write all labels on one line.
_LABEL = re.compile(
    r"(?:^[ \t]{0,8}[*#>_`-]{0,4}[ \t]{0,4}|(?<=[.!?])[ \t]{1,4})"
    r"(Thought|Action Input|Action|Observation|Final[ _]Answer|TOOL_CALL)"
    r"(?:[ \t]\d{1,3})?[*_]{0,3}[ \t]{0,4}:[*_]{0,3}[ \t]{0,4}",
    re.IGNORECASE | re.MULTILINE,
)
# Models also write their answer as if it were an action, in one line or two.
_ANSWER_AS_ACTION = re.compile(
    r"\s{0,8}[*_`]{0,3}Final[ _]Answer[*_`]{0,3}[ \t]{0,4}"
    r"(?::[*_`]{0,3}|\n[ \t*_]{0,8}Action Input[ \t]{0,4}:[*_]{0,3})[ \t]{0,4}",
    re.IGNORECASE,
)
_FENCE = re.compile(r"\s*(?:```\w*|`)?\s*")


def label_kinds(text: str) -> set[str]:
    """Return the kinds of the labels in a text: thought, action, observation, final."""
    return {_kind_of(label) for label in _LABEL.finditer(text)}


def without_label(text: str) -> str:
    """Return a text without the label that it begins with."""
    label = _LABEL.match(text)
    return text[label.end() :].strip() if label else text


def labelled_steps(text: str, form: ReplyFormat) -> tuple[int, list[TrajectoryStep]]:
    """Return the end of the part that the conversation keeps, and the steps of a labelled text."""
    steps: list[TrajectoryStep] = []
    label = _LABEL.search(text)
    before = text[: label.start()] if label else text
    if before.strip():
        kind = StepType.THOUGHT if label else form.unlabelled
        steps.append(TrajectoryStep(kind, before.strip()))
    has_acted = False
    while label:
        kind, start = _kind_of(label), label.end()
        if kind == "action" and (answer := _ANSWER_AS_ACTION.match(text, start)):
            kind, start = "final", answer.end()
        if kind == "observation" and has_acted:
            return len(text[: label.start()].rstrip()), steps
        if kind == "action":
            step, start = _action_step(text, start, form)
            steps.append(step)
            has_acted = True
            label = _LABEL.search(text, start)
            continue
        following = _LABEL.search(text, start)
        content = text[start : following.start() if following else len(text)].strip()
        if kind == "final":
            steps.append(TrajectoryStep(StepType.FINAL_ANSWER, content))
            return len(text), steps
        if content:
            steps.append(TrajectoryStep(StepType.THOUGHT, content))
        label = following
    return len(text), steps


def _kind_of(label: re.Match[str]) -> str:
    name = label.group(1).lower()
    if name in ("action", "tool_call"):
        return "action"
    return "final" if name.startswith("final") else name


def _action_step(text: str, start: int, form: ReplyFormat) -> tuple[TrajectoryStep, int]:
    """Return the step of the call that begins at `start`, and the position of its end."""
    fence = _FENCE.match(text, start)
    begin = fence.end() if fence else start
    try:
        call, end = _call_at(text, begin)
        call = bound_call(call, form.tools)
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
    if line.startswith(("{", "[")):
        value, end = parse_value(text, begin)
        calls = calls_in_json(value)
        if len(calls) != 1:
            raise CallParseError("write one call after each 'Action:'")
        return calls[0], end
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
