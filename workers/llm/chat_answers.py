"""Reads an OpenAI chat completion into a `ModelResponse`.

Both OpenAI-compatible clients pass the raw bytes of the answer. An answer that is not a completion
becomes one of the model errors. Must not: send, retry, or parse a tool call's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.contract.errors import ModelError
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.llm.call_errors import HttpAnswer, error_for_answer, error_in_body, malformed
from workers.llm.json_text import JsonError, dump_json
from workers.llm.known_prompts import parse_answer
from workers.llm.token_capture import captured_tokens, policy_version

#: Fields of a message with its reasoning: first those of DeepSeek, SGLang and older vLLM, then of
#: newer vLLM and OpenRouter, last OpenRouter's blocks, some of which are signed.
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")


def read_json_answer(answer: HttpAnswer, url: str) -> Mapping[str, Any]:
    """Return the JSON object of a 200 answer.

    Raises:
        ModelError: The status is not 200, or the body is an error or not a JSON object.
    """
    if answer.status != 200:
        raise error_for_answer(answer, url)
    if answer.streamed is not None:
        return answer.streamed
    try:
        body = parse_answer(answer.body)
    except JsonError as error:
        raise _not_json(answer, url, error) from None
    if not isinstance(body, Mapping):
        raise malformed(f"{url} answered a JSON {type(body).__name__}, not a completion object.")
    error = error_in_body(body, url)
    if error is not None:
        raise error
    return body


def read_completion(answer: HttpAnswer, url: str) -> ModelResponse:
    """Read the first choice of a chat completion.

    Raises:
        ModelError: The answer is an error, or not a chat completion.
    """
    body = read_json_answer(answer, url)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise malformed(f"{url} answered a completion without choices.")
    choice = choices[0]
    error = error_in_body(choice, url)
    if error is not None:
        raise error
    message = choice.get("message")
    if message is None and isinstance(choice.get("text"), str):
        message = {"content": choice["text"]}  # a text completion
    if not isinstance(message, Mapping):
        raise malformed(f"{url} answered a choice without a message.")
    return _response(body, choice, message, answer, url)


def _response(
    body: Mapping[str, Any],
    choice: Mapping[str, Any],
    message: Mapping[str, Any],
    answer: HttpAnswer,
    url: str,
) -> ModelResponse:
    tokens = captured_tokens(body, choice)
    usage = body.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    metadata: dict[str, Any] = {}
    fields = {name: message[name] for name in _REASONING if message.get(name)}
    if fields:
        metadata["reasoning_fields"] = fields
        metadata["reasoning"] = next((each for each in fields.values() if type(each) is str), "")
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        metadata["refusal"] = refusal
    if tokens.source:
        metadata["token_source"] = tokens.source
    if tokens.refusal:
        metadata["token_refusal"] = tokens.refusal
    request_id = answer.headers.get("x-request-id")
    if request_id:
        metadata["request_id"] = request_id
    return ModelResponse(
        text=_text(message.get("content"), url) or metadata.get("refusal", ""),
        tool_calls=_tool_calls(message.get("tool_calls"), url),
        finish_reason=_string(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        model=_string(body.get("model")),
        response_id=_string(body.get("id")),
        prompt_token_ids=tokens.prompt_token_ids,
        completion_token_ids=tokens.completion_token_ids,
        logprobs=tokens.logprobs,
        policy_version=policy_version(body, choice, answer.headers),
        metadata=metadata,
    )


def _text(content: Any, url: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    raise malformed(f"{url} answered a message whose content is a {type(content).__name__}.")


def _tool_calls(calls: Any, url: str) -> tuple[NativeToolCall, ...]:
    if not calls:
        return ()
    if not isinstance(calls, list):
        raise malformed(f"{url} answered tool_calls that are a {type(calls).__name__}.")
    return tuple(_tool_call(call, number, url) for number, call in enumerate(calls))


def _tool_call(call: Any, number: int, url: str) -> NativeToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(function, Mapping):
        raise malformed(f"{url} answered a tool call without a function name.")
    arguments = function.get("arguments")
    # The format requires JSON text, but some servers send the object itself.
    if arguments is not None and not isinstance(arguments, str):
        arguments = dump_json(arguments).decode()
    return NativeToolCall(
        id=str(call.get("id") or f"call_{number}"), name=name, arguments=arguments or "{}"
    )


def _not_json(answer: HttpAnswer, url: str, error: JsonError) -> ModelError:
    start = answer.body[:200].decode("utf-8", "replace").strip()
    if start.startswith("<"):
        return malformed(
            f"{url} answered a web page instead of JSON; is the base URL that of the API "
            f"(often it ends in /v1)? It begins: {start[:80]}"
        )
    if not start:
        return malformed(f"{url} answered 200 with an empty body.")
    return malformed(f"{url} answered JSON that does not parse ({error}); it begins: {start[:80]}")


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
