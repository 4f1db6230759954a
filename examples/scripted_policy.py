"""The model of the examples: the endpoint that the environment names, else a script.

With `OPENAI_API_KEY` (or `OPENAI_BASE_URL`) or `ANTHROPIC_API_KEY` set, the examples call that
endpoint, else `ScriptedPolicy`, which needs no network and no key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from workers.agentic_rollout import client_from_environment

Script = Mapping[str, Sequence[Any]]


class ScriptedPolicy:
    """Replies by a script: the question selects the replies, the turn selects one of them.

    The object keeps no state, so any number of conversations can use it at once.

    Args:
        script: A part of the question to its replies, in order; "" matches any other question.
    """

    def __init__(self, script: Script) -> None:
        self.script = script

    async def __call__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Return the reply of this turn; after the last one, the last reply again."""
        question = next(str(m["content"]) for m in messages if m["role"] == "user")
        replies = next(replies for part, replies in self.script.items() if part in question)
        turn = sum(message["role"] == "assistant" for message in messages)
        return replies[min(turn, len(replies) - 1)]


@asynccontextmanager
async def open_llm(script: Script) -> AsyncIterator[Any]:
    """Yield the environment's model, or the script; close connections at the end."""
    client = client_from_environment()
    if client is None:
        print("(no OPENAI_API_KEY or ANTHROPIC_API_KEY: answers come from a script)")
        yield ScriptedPolicy(script)
        return
    from workers.llm.connections import close_connections

    print(f"(answers come from {client.base_url}, model {client.model})")
    try:
        yield client.generate
    finally:
        await close_connections()


def call_tool(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    """Return a reply that calls a tool in the OpenAI format."""
    function = {"name": name, "arguments": arguments}
    return {
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
