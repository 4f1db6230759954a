"""The model as an HTTP endpoint of one attempt, for agents that bring a client of their own.

A function agent asks for `endpoint`, and the agent `command` passes it to its program. The worker's
gateway answers the calls and records them. Must not: know HTTP, or how the endpoint is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

#: Label of calls whose key names no sub-agent.
MAIN_AGENT = ""
#: Separates a key from the label of a sub-agent; keys do not contain this character.
LABEL_MARK = "~"


class NoEndpoint(RuntimeError):
    """The model's client cannot be reached over HTTP."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of one attempt; it answers until the attempt ends.

    Args:
        base_url: For OpenAI's clients, with `/v1`.
        api_key: The attempt's key.
        model: The model to name in requests.
        socket_path: A Unix socket with the same server; None if there is none.
    """

    base_url: str
    api_key: str
    model: str
    socket_path: str | None = None

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for Anthropic's clients, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    def for_agent(self, label: str) -> Endpoint:
        """Return the endpoint with a key whose calls are recorded under a sub-agent's label."""
        key = self.api_key.partition(LABEL_MARK)[0]
        return replace(self, api_key=f"{key}{LABEL_MARK}{label}")


@asynccontextmanager
async def open_endpoint(
    llm_generate_func: Any, generate: Callable[..., Any], *, with_socket: bool = False
) -> AsyncIterator[Endpoint]:
    """Open the endpoint of a trajectory; calls under way are cancelled at the end of the block.

    Args:
        llm_generate_func: The client that the agent was given. A client with a gateway, such as a
            worker's `ModelCalls`, has an async context manager `serve(generate, with_socket=)`.
        generate: Answers each call; it calls and records the client.
        with_socket: Whether a Unix socket is needed, for a sandbox without a network.

    Raises:
        NoEndpoint: The client has no gateway.
    """
    serve = getattr(llm_generate_func, "serve", None)
    if serve is None:
        raise NoEndpoint(
            "The agent asks for an endpoint, and only a worker has one. Run the agent by "
            "`rollout run`, or give it its model as `llm`."
        )
    async with serve(generate, with_socket=with_socket) as endpoint:
        yield endpoint
