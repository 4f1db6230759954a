"""The offline policy's tokens: one per UTF-8 byte, with role and end marks.

A conversation's next prompt begins with exactly the previous prompt and completion, as with a real
chat template. So token-level code can be tested without a model. Must not: know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.llm.json_text import dump_json
from workers.offline_policy.draws import draw
from workers.offline_policy.rules import Reply, message_text

END_OF_TURN = 256
_ROLE_TOKENS = {"system": 257, "developer": 257, "user": 258, "assistant": 259, "tool": 260}
_TOOLS_TOKEN = 261


def prompt_token_ids(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """Return the ids of a prompt, up to the mark that begins the assistant's turn."""
    ids: list[int] = []
    if tools:
        ids.append(_TOOLS_TOKEN)
        ids.extend(dump_json(tools))
    for message in messages:
        role = str(message.get("role"))
        ids.append(_ROLE_TOKENS.get(role, _ROLE_TOKENS["user"]))
        ids.extend(message_text(message).encode("utf-8", "replace"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            ids.extend(_call_bytes(str(function.get("name")), str(function.get("arguments"))))
        ids.append(END_OF_TURN)
    ids.append(_ROLE_TOKENS["assistant"])
    return ids


def completion_token_ids(reply: Reply) -> list[int]:
    """Return the ids of an answer, with the mark that ends the turn."""
    ids = list(reply.text.encode("utf-8", "replace"))
    if reply.tool_name:
        ids.extend(_call_bytes(reply.tool_name, reply.tool_arguments))
    return [*ids, END_OF_TURN]


def completion_logprobs(ids: Sequence[int], *, seed: int, prompt_text: str) -> list[float]:
    """Return one logprob per id: finite, not positive, the same for the same seed."""
    scale = 0.05 + draw(seed, "logprob", prompt_text, "")
    return [-scale * ((31 * token + position) % 17) / 16 for position, token in enumerate(ids)]


def token_text(token: int) -> str:
    """Return the text of one id, empty for a mark."""
    return bytes((token,)).decode("latin-1") if token < END_OF_TURN else ""


def _call_bytes(name: str, arguments: str) -> bytes:
    return f"<tool_call>{name}{arguments}</tool_call>".encode("utf-8", "replace")
