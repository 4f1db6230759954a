"""The answers of the mock LLM, and the reading of requests without decoding their JSON.

The mock server uses it. A rollout has `turns - 1` calculator calls and then the final answer, as
text (`Action: calculator(...)`) or, if the request offers `tools`, as native tool calls. The
answers are rendered once into HTTP templates. Must not: keep state between requests.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

EXPRESSIONS = ("17 * 23", "391 + 9")
FINAL_ANSWER = "400"

_ROLES = re.compile(rb'"role"\s*:\s*"(\w+)"')
_USER = re.compile(rb'"user"\s*:\s*"([^"\\]+)"')
_ATTEMPT = re.compile(r"-a\d+$")
_MARKER = re.compile(rb"\[row (\d+)(?: sample (\d+))?\]")
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_TOOLS = re.compile(rb'"tools"\s*:\s*\[\s*\{')
_TOTAL_TOKENS = re.compile(rb'"total_tokens":\s*(\d+)')
_COMPLETION_TOKENS = 24
_VOCABULARY = 150_000


def count_turns(body: bytes) -> int:
    """Return the number of the model's turns in this request's messages.

    Neighbouring assistant messages are one turn, because an agent may send thought and action
    separately. Quotes inside a text are escaped, so `"assistant"` in a text does not match.
    """
    spoken = body.count(b'"assistant"')
    if spoken < 2:
        return spoken
    roles = _ROLES.findall(body)
    return sum(
        role == b"assistant" and following != b"assistant"
        for role, following in zip(roles, [*roles[1:], b""], strict=True)
    )


def read_identity(body: bytes) -> str | None:
    """Return the rollout of a request: its `user` field, else the marker in its prompt.

    The attempt is removed from a label (`math7-g000013-r3-a2`), so that a second attempt counts as
    a repetition.
    """
    if found := _USER.search(body):
        return without_attempt(found[1].decode())
    if found := _MARKER.search(body):
        return f"g{int(found[1]):06d}-r{int(found[2] or 0)}"
    return None


def without_attempt(label: str) -> str:
    """Return the rollout's part of an attempt's label."""
    return _ATTEMPT.sub("", label)


def draw_key(identity: str) -> str:
    """Return the part of an identity that is equal in all runs of a workload."""
    cut = identity.rfind("-g")
    return identity[cut + 1 :] if cut >= 0 else identity


def asks_for_stream(body: bytes) -> bool:
    """Whether the request wants server-sent events, which the mock does not speak."""
    return _STREAM.search(body) is not None


class AnswerBook:
    """The HTTP responses of one server, rendered once for each turn and protocol.

    Args:
        turns: Turns of a rollout.
        context_tokens: Tokens of the conversation after the last turn; 0: answers have no ids.
    """

    def __init__(self, turns: int, context_tokens: int = 0) -> None:
        self._last = turns - 1
        draw = random.Random(context_tokens)
        ids = [draw.randrange(_VOCABULARY) for _ in range(context_tokens)]
        self._completion_tokens = context_tokens // turns // 2 or _COMPLETION_TOKENS
        self._text, self._native = [
            [
                self._template(message(turn, self._last), ids[: len(ids) * (turn + 1) // turns])
                for turn in range(turns)
            ]
            for message in (_text_message, _native_message)
        ]

    def answer(self, turn: int, call_no: int, body: bytes) -> bytes:
        """Return the HTTP response for a turn; turns after the last repeat the final answer."""
        native = b'"tools"' in body and _TOOLS.search(body) is not None
        template = (self._native if native else self._text)[min(turn, self._last)]
        # An estimate; it only has to grow with the prompt.
        prompt_tokens = len(body) // 4
        return template % (call_no, prompt_tokens, prompt_tokens + self._completion_tokens)

    def _template(self, message: dict[str, Any], ids: list[int]) -> bytes:
        """A bytes format of (call number, prompt tokens, total tokens) with a fixed length."""
        n = self._completion_tokens
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        top: dict[str, Any] = {}
        if ids:
            # The text is as long as its tokens, so that requests grow like those of a model.
            message["content"] = f"Thought: {'abc ' * n}\n{message['content'] or ''}"
            choice |= {"logprobs": {"content": _logprobs(n)}, "token_ids": ids[-n:]}
            top["prompt_token_ids"] = ids[:-n]
        choices = _rendered([choice]).replace("%", "%%")
        fields = "".join(f'"{name}":{_rendered(value)},' for name, value in top.items())
        body = (
            '{"id":"chatcmpl-%010d","object":"chat.completion","created":1750000000,'
            f'"model":"mock",{fields}"choices":{choices},"usage":{{"prompt_tokens":%7d,'
            f'"completion_tokens":{n},"total_tokens":%7d}}}}'
        )
        length = len(body % (0, 0, 0))
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {length}\r\n\r\n{body}".encode()


def tokens_of(response: bytes) -> int:
    """The tokens of a response, 0 for an error."""
    found = _TOTAL_TOKENS.search(response)
    return int(found[1]) if found else 0


def http_response(status: str, payload: Any, *headers: str) -> bytes:
    """A complete JSON response with its length."""
    body = json.dumps(payload, separators=(",", ":")).encode()
    lines = (
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error_response(status: int, retry_after_s: float) -> bytes:
    """Return a 429 or 500 response in the format of OpenAI's API."""
    if status == 429:
        error = {"message": "Rate limit reached (injected)", "type": "rate_limit_exceeded"}
        wait = f"retry-after: {retry_after_s:g}"
        return http_response("429 Too Many Requests", {"error": error}, wait)
    error = {"message": "The server had an error (injected)", "type": "server_error"}
    return http_response("500 Internal Server Error", {"error": error})


def _text_message(turn: int, last: int) -> dict[str, Any]:
    if turn == last:
        text = f"Thought: I know the result.\nFinal Answer: {FINAL_ANSWER}"
    else:
        expression = EXPRESSIONS[turn % len(EXPRESSIONS)]
        text = f"Thought: I calculate.\nAction: calculator(expression='{expression}')"
    return {"role": "assistant", "content": text}


def _native_message(turn: int, last: int) -> dict[str, Any]:
    if turn == last:
        return {"role": "assistant", "content": FINAL_ANSWER}
    arguments = json.dumps({"expression": EXPRESSIONS[turn % len(EXPRESSIONS)]})
    call = {
        "id": f"call_{turn}",
        "type": "function",
        "function": {"name": "calculator", "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _logprobs(n: int) -> list[dict[str, Any]]:
    """Return logprobs as vLLM writes them, with the bytes of each token."""
    return [
        {
            "token": "abc ",
            "logprob": -round((7919 * at % 9973 + 1) / 9973, 6),
            "bytes": list(b"abc "),
            "top_logprobs": [],
        }
        for at in range(n)
    ]


def _rendered(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
