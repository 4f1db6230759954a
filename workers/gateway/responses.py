"""The dialect of OpenAI's Responses API: `/v1/responses`.

Items become chat messages, and responses become items. Pure functions, used by the server. The
gateway keeps no conversations, so each request holds the whole input. Must not: send anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from workers.core.model_response import ModelResponse
from workers.gateway.call_request import CallRequest
from workers.gateway.reasoning_fields import (
    DEFAULT_MARK,
    reasoning_mark,
    restored_reasoning,
)
from workers.gateway.rejections import bad_request
from workers.gateway.request_fields import read_list, read_model, unsupported

#: The parameters that have one meaning in both formats.
_SAME = ("temperature", "top_p", "top_logprobs", "parallel_tool_calls")
#: Fields by which a request continues a conversation that the server keeps.
_NEED_MEMORY = ("previous_response_id", "conversation", "prompt", "background")
_WHOLE_INPUT = "; the gateway keeps no conversations: send the whole input."
_ROLES = {"developer": "system"}  # chat templates of open models have no developer

Message = dict[str, Any]
Item = Mapping[str, Any]


def read_response_request(body: Mapping[str, Any]) -> CallRequest:
    """Read a request.

    Raises:
        Rejection: It cannot be answered.
    """
    for name in _NEED_MEMORY:
        if body.get(name):
            raise bad_request(f"The field `{name}` is not supported{_WHOLE_INPUT}")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": str(body["instructions"])})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _chat_messages(read_list(body, "input", is_required=True))
    return CallRequest(read_model(body), messages, _options(body), bool(body.get("stream")), body)


def write_response(response: ModelResponse, request: CallRequest) -> dict[str, Any]:
    """Write the body of an answer."""
    return response_body(request, new_id("resp"), response, output_items(response))


def response_body(
    request: CallRequest,
    response_id: str,
    response: ModelResponse | None,
    items: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write a response; one without a `ModelResponse` is in progress."""
    is_cut = response is not None and response.finish_reason == "length"
    status = "in_progress" if response is None else "incomplete" if is_cut else "completed"
    body = request.body
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": (response and response.model) or request.model,
        "output": items,
        "parallel_tool_calls": body.get("parallel_tool_calls", True) is not False,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "usage": None if response is None else _usage(response),
    }


def output_items(response: ModelResponse) -> list[dict[str, Any]]:
    """Return the items of a response: its reasoning, its text, its tool calls."""
    items: list[dict[str, Any]] = []
    if reasoning := response.metadata.get("reasoning"):
        mark = reasoning_mark(response.metadata.get("reasoning_fields", {}))
        items.append(reasoning_item(new_id("rs"), reasoning, mark))
    if response.text or not response.tool_calls:
        items.append(message_item(new_id("msg"), response.text))
    items += [
        call_item(new_id("fc"), call.id, call.name, call.arguments) for call in response.tool_calls
    ]
    return items


def reasoning_item(item_id: str, text: str | None, mark: str) -> dict[str, Any]:
    """Return an item of reasoning; without a text it has only begun."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": mark,
        "status": _status(text),
    }


def message_item(item_id: str, text: str | None) -> dict[str, Any]:
    """Return an item of text; without a text it has only begun."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": _status(text),
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str) -> dict[str, Any]:
    """Return the content of an item of text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(item_id: str, call_id: str, name: str, arguments: str | None) -> dict[str, Any]:
    """Return an item of a tool call; without arguments it has only begun."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments or "",
        "status": _status(arguments),
    }


def new_id(kind: str) -> str:
    """Return an id of a new response or item."""
    return f"{kind}_{uuid.uuid4().hex}"


def _status(content: str | None) -> str:
    return "in_progress" if content is None else "completed"


def _usage(response: ModelResponse) -> dict[str, Any]:
    prompt, completion = response.prompt_tokens or 0, response.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        options["max_tokens"] = body["max_output_tokens"]
    if tools := read_list(body, "tools"):
        options["tools"] = [_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise unsupported(f"A tool choice of type {choice.get('type')!r}")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and "tools" in options:
        options["tool_choice"] = choice
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping) and reasoning.get("effort"):
        options["reasoning_effort"] = reasoning["effort"]
    text = body.get("text")
    if isinstance(text, Mapping):
        options |= _text_format(text.get("format"))
    return options


def _text_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, Mapping) or form.get("type") in (None, "text"):
        return {}
    if form.get("type") != "json_schema":
        return {"response_format": {"type": form["type"]}}
    names = ("name", "description", "schema", "strict")
    schema = {name: form[name] for name in names if form.get(name) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tool(tool: Item) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"The tool {tool.get('type')!r}, which OpenAI's servers run,")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chat_messages(items: list[Item]) -> list[Message]:
    """Return the messages; the items of one turn of the assistant become one message."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            messages.append(_input_message(item))
        elif kind == "function_call_output":
            messages.append(_tool_message(item))
        elif kind in ("message", "function_call", "reasoning"):
            _add_to_turn(_turn(messages, is_new_text=kind == "message"), kind, item)
        else:
            raise unsupported(f"An input item of type {kind!r}")
    return messages


def _turn(messages: list[Message], *, is_new_text: bool) -> Message:
    last = messages[-1] if messages else {"role": "none"}
    if last["role"] == "assistant":
        # A second text begins a turn of its own; reasoning alone still waits for its text.
        is_full = bool(last["content"] or "tool_calls" in last)
        if not (is_new_text and is_full):
            return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_to_turn(message: Message, kind: str, item: Item) -> None:
    if kind == "message":
        message["content"] = _text(item.get("content"))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        text = "".join(str(part.get("text") or "") for part in parts)
        restored_reasoning(message, text, item.get("encrypted_content") or DEFAULT_MARK, item)
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _input_message(item: Item) -> Message:
    role = str(item.get("role"))
    return {"role": _ROLES.get(role, role), "content": _parts(item.get("content"))}


def _tool_message(item: Item) -> Message:
    output = _parts(item.get("output"))
    return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output}


def _parts(content: Any) -> str | list[dict[str, Any]]:
    """Return one text, or OpenAI's chat parts if there is an image among them."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = read_list({"content": content}, "content")
    if all(part.get("type") in ("input_text", "output_text", "text") for part in parts):
        return _text(parts)
    return [_part(part) for part in parts]


def _part(part: Item) -> dict[str, Any]:
    if part.get("type") in ("input_text", "output_text", "text"):
        return {"type": "text", "text": str(part.get("text") or "")}
    if part.get("type") != "input_image" or not part.get("image_url"):
        raise unsupported(f"Content of type {part.get('type')!r}")
    image = {"url": part["image_url"]}
    if part.get("detail"):
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = read_list({"content": content}, "content")
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
