"""The rules by which the offline policy answers in the agents' protocols.

The server passes one request's messages and tools and gets text or tool calls back. The rules
detect the caller's protocol: native tools, the react text protocol, `TOOL_CALL:` lines, or a
single question. Must not: do I/O, keep state, or decide about injected HTTP failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

from workers.llm.json_text import dump_json
from workers.offline_policy.answer_key import AnswerKey, KeyEntry
from workers.offline_policy.arithmetic import compute, find_expression, is_computable, write_number
from workers.offline_policy.draws import Mishap, wrong_by

DO_NOT_KNOW = "I do not know."
_BAD_OUTPUT = "Hmm, let me think about that in another way, one moment please"
_CALCULATOR = "calculator"
_FINISH = "finish"
_FIRST_TURN_MISHAPS = frozenset({Mishap.MALFORMED_CALL, Mishap.TOOL_ERROR, Mishap.BAD_OUTPUT})
_FINAL_LABEL = "Final Answer:"
_ACTION_LABEL = "Action:"
_TOOL_LABEL = "TOOL_CALL:"


class Protocol(StrEnum):
    """The form in which the caller expects tool calls."""

    NATIVE = "native"
    REACT = "react"
    TOOL_LINE = "tool_line"
    SINGLE_TURN = "single_turn"


@dataclass(frozen=True, slots=True)
class Task:
    """One request's question, its entry in the answer key, and the state of its conversation.

    All seeded decisions about this prompt depend on `prompt_text`.
    """

    prompt_text: str
    protocol: Protocol
    is_labelled: bool  #: the answer must follow `Final Answer:`
    turn: int  #: answers of the policy already in the conversation
    tools: Mapping[str, str]  #: usable tool → its first text parameter
    entry: KeyEntry | None
    expression: str | None

    @property
    def final(self) -> str | None:
        """The correct answer, None if the policy cannot compute or look it up."""
        if self.entry is not None:
            return self.entry.final
        return write_number(compute(self.expression)) if self.expression else None


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: text, or a native tool call."""

    text: str = ""
    tool_name: str | None = None
    tool_arguments: str = ""


def read_task(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    key: AnswerKey | None,
) -> Task:
    """Find the question, the protocol and the turn of a request."""
    users = [message_text(message).strip() for message in messages if _role(message) == "user"]
    system = "\n".join(
        message_text(message) for message in messages if _role(message) in ("system", "developer")
    )
    turn = sum(_role(message) == "assistant" for message in messages)
    usable = _native_tools(tools)
    protocol = Protocol.NATIVE if usable else _text_protocol(system)
    entry = _entry(users, key) if key else None
    # In a tool conversation later user messages are observations, which also contain numbers.
    first = users[0] if users else ""
    question = first if protocol is not Protocol.SINGLE_TURN or not users else users[-1]
    if protocol in (Protocol.REACT, Protocol.TOOL_LINE) and _CALCULATOR in system:
        usable = {_CALCULATOR: "expression"}
    return Task(
        prompt_text=entry.question if entry else first,
        protocol=protocol,
        is_labelled=_FINAL_LABEL in system,
        turn=turn,
        tools=usable,
        entry=entry,
        expression=_expression(entry, question),
    )


def reply_to(
    task: Task, *, seed: int, sample_key: object, is_wrong: bool, mishap: Mishap | None = None
) -> Reply:
    """Answer one request of a conversation.

    With a usable calculator the first turn is a tool call and the second the final answer. A
    mishap in the first turn shifts both by one turn.
    """
    turn = task.turn
    if mishap in _FIRST_TURN_MISHAPS and task.protocol is not Protocol.SINGLE_TURN:
        if turn == 0:
            return _mishap_reply(task, mishap)
        turn -= 1
    elif mishap in _FIRST_TURN_MISHAPS:
        return Reply(_BAD_OUTPUT)
    if turn == 0 and task.expression and _CALCULATOR in task.tools:
        return _tool_reply(task, _CALCULATOR, task.expression)
    final = task.final
    if final is not None and is_wrong:
        final = _wrong_answer(final, wrong_by(seed, task.prompt_text, sample_key))
    return _final_reply(task, final)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message whose content is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""


def _final_reply(task: Task, final: str | None) -> Reply:
    answer = final or DO_NOT_KNOW
    if task.protocol is Protocol.NATIVE and _FINISH in task.tools:
        return _tool_reply(task, _FINISH, answer)
    if task.is_labelled:
        thought = "Thought: I have what I need.\n" if task.protocol is Protocol.REACT else ""
        return Reply(f"{thought}Final Answer: {answer}")
    if final is not None and task.entry is not None and task.entry.marked:
        return Reply(f"The answer follows.\n#### {answer}")
    if final is not None and task.entry is None and task.protocol is Protocol.SINGLE_TURN:
        return Reply(f"{task.expression} = {answer}")
    return Reply(answer)


def _tool_reply(task: Task, tool: str, argument: str) -> Reply:
    match task.protocol:
        case Protocol.NATIVE:
            arguments = dump_json({task.tools[tool]: argument}).decode()
            return Reply(tool_name=tool, tool_arguments=arguments)
        case Protocol.TOOL_LINE:
            return Reply(f"TOOL_CALL: {tool}({task.tools[tool]}={argument!r})")
    return Reply(
        f"Thought: I need to compute {argument}.\nAction: {tool}({task.tools[tool]}={argument!r})"
    )


def _mishap_reply(task: Task, mishap: Mishap | None) -> Reply:
    if mishap is Mishap.BAD_OUTPUT or _CALCULATOR not in task.tools:
        return Reply(_BAD_OUTPUT)
    if mishap is Mishap.TOOL_ERROR:
        return _tool_reply(task, _CALCULATOR, "1 / 0")
    whole = _tool_reply(task, _CALCULATOR, task.expression or "1 + 1")
    if whole.tool_name:
        return Reply(tool_name=whole.tool_name, tool_arguments=whole.tool_arguments[:-3])
    return Reply(whole.text[:-3])


def _wrong_answer(final: str, delta: int) -> str:
    try:
        return write_number(Fraction(final.replace(",", "")) + delta)
    except (ValueError, ZeroDivisionError):
        return DO_NOT_KNOW


def _text_protocol(system: str) -> Protocol:
    if _TOOL_LABEL in system:
        return Protocol.TOOL_LINE
    is_react = _ACTION_LABEL in system and _FINAL_LABEL in system
    return Protocol.REACT if is_react else Protocol.SINGLE_TURN


def _entry(users: Sequence[str], key: AnswerKey) -> KeyEntry | None:
    for find in (key.exact, key.contained_in):
        for text in dict.fromkeys((*users[-1:], *users[:1])):
            entry = find(text)
            if entry is not None:
                return entry
    return None


def _expression(entry: KeyEntry | None, question: str) -> str | None:
    if entry is None:
        return find_expression(question)
    plain = entry.final.replace(",", "")
    return entry.expression or (plain if is_computable(plain) else None)


def _native_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    usable: dict[str, str] = {}
    for tool in tools or ():
        function = tool.get("function")
        function = function if isinstance(function, dict) else tool
        name = function.get("name")
        if isinstance(name, str):
            usable[name] = _text_parameter(function.get("parameters"))
    return usable


def _text_parameter(schema: Any) -> str:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    names = list(properties) if isinstance(properties, dict) else []
    return next((n for n in ("expression", "answer") if n in names), names[0] if names else "input")


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role"))
