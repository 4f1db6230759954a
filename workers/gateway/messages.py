"""The dialect of Anthropic's Messages API: `/v1/messages`.

Blocks become OpenAI messages, and responses become blocks. Pure functions, used by the server.
Must not: send anything. `workers/llm/anthropic_format.py` is the other direction.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from workers.core.model_response import ModelResponse
from workers.gateway.call_request import CallRequest
from workers.gateway.reasoning_fields import (
    reasoning_mark,
    restored_reasoning,
)
from workers.gateway.rejections import Rejection, bad_request
from workers.gateway.request_fields import read_list, read_model, unsupported
from workers.llm.json_text import JsonError, parse_json

#: The parameters that have one meaning in both formats.
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "thinking")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

Block = Mapping[str, Any]
Message = dict[str, Any]


def read_messages(body: Mapping[str, Any]) -> CallRequest:
    """Read a request.

    Raises:
        Rejection: It cannot be answered.
    """
    if body.get("mcp_servers"):
        raise unsupported("The field `mcp_servers`")
    messages: list[Message] = []
    if system := _text(_blocks(body.get("system"), "system")):
        messages.append({"role": "system", "content": system})
    for message in read_list(body, "messages", is_required=True):
        messages += _chat_messages(message)
    return CallRequest(read_model(body), messages, _options(body), bool(body.get("stream")), body)


def write_message(response: ModelResponse, request: CallRequest) -> dict[str, Any]:
    """Write the body of an answer."""
    return {
        "id": response.response_id or new_message_id(),
        "type": "message",
        "role": "assistant",
        "model": response.model or request.model,
        "content": _content(response),
        "stop_reason": stop_reason(response),
        "stop_sequence": None,
        "usage": message_usage(response),
    }


def stop_reason(response: ModelResponse) -> str:
    """Return the API's reason for the end of the response."""
    if response.tool_calls and response.finish_reason in (None, "stop"):
        return "tool_use"
    return _STOP_REASONS.get(response.finish_reason or "stop", "end_turn")


def message_usage(response: ModelResponse) -> dict[str, int]:
    """Return the tokens that the call used; 0 where the server does not count."""
    return {
        "input_tokens": response.prompt_tokens or 0,
        "output_tokens": response.completion_tokens or 0,
    }


def anthropic_error(rejection: Rejection) -> dict[str, Any]:
    """Write the body of an error."""
    message = rejection.message
    if rejection.code == "context_length_exceeded":
        # Programs search for these words, because the API has no error code for this case.
        message = f"prompt is too long: {message}"
    kind = _ERROR_TYPES.get(rejection.status)
    kind = kind or ("api_error" if rejection.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def new_message_id() -> str:
    """Return an id of a new message."""
    return f"msg_{uuid.uuid4().hex}"


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("stop_sequences"):
        options["stop"] = body["stop_sequences"]
    if tools := read_list(body, "tools"):
        options["tools"] = [_tool(tool) for tool in tools]
    options |= _tool_choice(body.get("tool_choice"))
    output = body.get("output_config")
    if isinstance(output, Mapping):
        options |= _output_options(output)
    return options


def _output_options(output: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    form = output.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        schema = {"name": "output", "schema": form.get("schema")}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output.get("effort"):
        options["reasoning_effort"] = output["effort"]
    return options


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"The tool {tool.get('type')!r}, which Anthropic's servers run,")
    function = {
        "name": tool.get("name"),
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if not isinstance(choice, Mapping):
        return {}
    kind = choice.get("type")
    written: dict[str, Any] = {}
    if kind == "tool":
        named = {"name": choice.get("name")}
        written["tool_choice"] = {"type": "function", "function": named}
    elif kind in _TOOL_CHOICES:
        written["tool_choice"] = _TOOL_CHOICES[kind]
    if choice.get("disable_parallel_tool_use"):
        written["parallel_tool_calls"] = False
    return written


def _chat_messages(message: Mapping[str, Any]) -> list[Message]:
    role = message.get("role")
    blocks = _blocks(message.get("content"), "content")
    if role == "assistant":
        return [_assistant(blocks)]
    if role == "system":
        return [{"role": "system", "content": _text(blocks)}]
    if role != "user":
        raise bad_request(f"A message has the role {role!r}; it must be user or assistant.")
    results = [block for block in blocks if block.get("type") == "tool_result"]
    others = [block for block in blocks if block.get("type") != "tool_result"]
    messages = [_tool_message(block) for block in results]
    if others:
        messages.append({"role": "user", "content": _parts(others)})
    return messages


def _assistant(blocks: list[Block]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                message["content"] += str(block.get("text") or "")
            case "tool_use":
                calls.append(_tool_call(block))
            case "thinking":
                restored_reasoning(
                    message, str(block.get("thinking") or ""), block.get("signature"), block
                )
            case "redacted_thinking":
                restored_reasoning(message, "", None, block)
            case kind:
                raise unsupported(f"A block of type {kind!r} of the assistant")
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Block) -> dict[str, Any]:
    # The spacing of Python's json is that of most chat templates.
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    return {
        "id": str(block.get("id")),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": arguments},
    }


def _tool_message(block: Block) -> Message:
    return {
        "role": "tool",
        "tool_call_id": str(block.get("tool_use_id")),
        "content": _parts(_blocks(block.get("content"), "content")),
    }


def _parts(blocks: list[Block]) -> str | list[dict[str, Any]]:
    """Return one text, or OpenAI's parts if there is an image among the blocks."""
    if all(block.get("type") == "text" for block in blocks):
        return _text(blocks)
    return [_part(block) for block in blocks]


def _part(block: Block) -> dict[str, Any]:
    if block.get("type") == "text":
        return {"type": "text", "text": str(block.get("text") or "")}
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, Mapping):
        raise unsupported(f"A block of type {block.get('type')!r} of the user")
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _blocks(content: Any, name: str) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return read_list({name: content}, name)


def _text(blocks: list[Block]) -> str:
    return "\n".join(str(block.get("text") or "") for block in blocks)


def _content(response: ModelResponse) -> list[dict[str, Any]]:
    fields = response.metadata.get("reasoning_fields", {})
    # Claude's own blocks are signed, so they are returned unchanged.
    blocks = [dict(block) for block in fields.get("thinking_blocks", ())]
    if not blocks and (thinking := response.metadata.get("reasoning")):
        mark = reasoning_mark(fields)
        blocks.append({"type": "thinking", "thinking": thinking, "signature": mark})
    if response.text or not response.tool_calls:
        blocks.append({"type": "text", "text": response.text})
    for call in response.tool_calls:
        given = {"id": call.id, "name": call.name, "input": _input(call.arguments)}
        blocks.append({"type": "tool_use", **given})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = parse_json(arguments.encode("utf-8", "replace"))
    except JsonError:
        value = None
    # The format has no place for text that is no JSON object.
    return value if isinstance(value, dict) else {"arguments": arguments}
