"""OpenAI messages and tools to Anthropic's Messages format, and its answers back.

`ClaudeAPIClient` uses it, so that agents speak one format. Must not: send anything, or parse a
tool call's arguments more than the other format requires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.core.model_response import ModelResponse, NativeToolCall
from workers.llm.call_errors import malformed
from workers.llm.json_text import JsonError, dump_json, parse_json

DEFAULT_MAX_TOKENS = 1024  # the API requires `max_tokens`
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_TOOL_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
# OpenAI's parameters without a counterpart in this API, which rejects them.
_UNKNOWN_HERE = frozenset(
    {"seed", "n", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty"}
)
_THINKING = ("thinking", "redacted_thinking")

Block = dict[str, Any]


def anthropic_request(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the body of a Messages request.

    System messages move to the front. Tool results become blocks of a user message. Neighbouring
    messages of one role are joined, because the API requires alternating roles.
    """
    request: dict[str, Any] = {
        "model": model,
        "max_tokens": DEFAULT_MAX_TOKENS,
        "messages": _turns(messages),
    }
    system = "\n\n".join(
        _text(message.get("content"))
        for message in messages
        if message.get("role") in ("system", "developer")
    )
    if system:
        request["system"] = system
    if tools:
        request["tools"] = [_tool(tool) for tool in tools]
    request.update(_parameters(sampling))
    return request


def response_of(body: Mapping[str, Any], url: str) -> ModelResponse:
    """Read a Messages answer.

    Raises:
        ModelBadRequest: The answer is not a message.
    """
    blocks = body.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise malformed(f"{url} answered a message without content blocks.")
    usage = body.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    thinking = "".join(_strings(blocks, "thinking"))
    signed = [dict(block) for block in blocks if block.get("type") in _THINKING]
    return ModelResponse(
        text="".join(_strings(blocks, "text")),
        tool_calls=tuple(_call(block, url) for block in blocks if block.get("type") == "tool_use"),
        finish_reason=_FINISH_REASONS.get(str(body.get("stop_reason")), body.get("stop_reason")),
        prompt_tokens=_prompt_tokens(usage),
        completion_tokens=usage.get("output_tokens"),
        model=body.get("model"),
        response_id=body.get("id"),
        metadata={"reasoning": thinking, "reasoning_fields": {"thinking_blocks": signed}}
        if signed
        else {},
    )


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            continue
        side = "assistant" if role == "assistant" else "user"
        blocks = _blocks(message)
        if not blocks:
            continue
        if turns and turns[-1]["role"] == side:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": side, "content": blocks})
    _without_trailing_space(turns)
    return turns


def _blocks(message: Mapping[str, Any]) -> list[Block]:
    text = _text(message.get("content"))
    if message.get("role") == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": str(message.get("tool_call_id")),
            "content": text,
        }
        return [result]
    # The API rejects a call whose signed thinking is missing or changed, and empty text blocks.
    blocks: list[Block] = [dict(block) for block in message.get("thinking_blocks") or ()]
    blocks += [{"type": "text", "text": text}] if text.strip() else []
    return blocks + [_tool_use(call) for call in message.get("tool_calls") or ()]


def _tool_use(call: Mapping[str, Any]) -> Block:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    try:
        parsed = parse_json(arguments.encode("utf-8", "replace"))
    except JsonError:
        parsed = None
    if not isinstance(parsed, dict):
        # The model sees its own malformed arguments again, not a repaired version of them.
        parsed = {"arguments": arguments}
    return {
        "type": "tool_use",
        "id": str(call.get("id")),
        "name": function.get("name"),
        "input": parsed,
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    written: dict[str, Any] = {
        "name": function.get("name"),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    if function.get("description"):
        written["description"] = function["description"]
    return written


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    written = {name: value for name, value in sampling.items() if name not in _UNKNOWN_HERE}
    if "temperature" in written:
        written["temperature"] = min(1.0, max(0.0, float(written["temperature"])))
    stop = written.pop("stop", None)
    if stop:
        written["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    user = written.pop("user", None)
    if user is not None:
        written["metadata"] = {"user_id": str(user)}
    choice = _tool_choice(written.pop("tool_choice", None))
    if written.pop("parallel_tool_calls", True) is False:
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    if choice:
        written["tool_choice"] = choice
    return written


def _tool_choice(choice: Any) -> dict[str, Any] | None:
    if isinstance(choice, str):
        return {"type": _TOOL_CHOICES.get(choice, choice)}
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        return {"type": "tool", "name": choice["function"].get("name")}
    return dict(choice) if choice else None


def _without_trailing_space(turns: list[dict[str, Any]]) -> None:
    # A final assistant message is a prefill. The API rejects one that ends in white space.
    if turns and turns[-1]["role"] == "assistant":
        last = turns[-1]["content"][-1]
        if last["type"] == "text":
            last["text"] = last["text"].rstrip()


def _call(block: Mapping[str, Any], url: str) -> NativeToolCall:
    name = block.get("name")
    if not isinstance(name, str):
        raise malformed(f"{url} answered a tool call without a name.")
    arguments = dump_json(block.get("input") or {}).decode()
    return NativeToolCall(id=str(block.get("id")), name=name, arguments=arguments)


def _strings(blocks: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    return [str(block.get(kind) or "") for block in blocks if block.get("type") == kind]


def _prompt_tokens(usage: Mapping[str, Any]) -> int | None:
    if usage.get("input_tokens") is None:
        return None
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage.get(part) or 0 for part in parts)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
