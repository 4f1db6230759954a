"""One model call as an agent requests it, the same for all dialects.

Dialects read it from a request's body; the server passes it to the attempt. Must not: know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta
from workers.gateway.rejections import Rejection


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call: messages in the OpenAI format, and options as `ModelCalls` takes them.

    `body` is the decoded request, for answers that repeat parts of it.
    """

    model: str
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    is_stream: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)


class AnswerStream(Protocol):
    """Writes one streamed answer, as the bytes of server-sent events."""

    def delta(self, delta: ResponseDelta) -> bytes:
        """Return the events of a piece of the response."""
        ...

    def end(self, response: ModelResponse) -> bytes:
        """Return the last events; a response of which no piece was written comes whole."""
        ...

    def error(self, rejection: Rejection) -> bytes:
        """Return the event of an error after the first piece."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: four pure functions.

    Args:
        read: The request of a body; raises `Rejection` for one that cannot be answered.
        write: The body of an answer.
        stream: A new stream for a request.
        error: The body of an error.
    """

    read: Callable[[Mapping[str, Any]], CallRequest]
    write: Callable[[ModelResponse, CallRequest], dict[str, Any]]
    stream: Callable[[CallRequest], AnswerStream]
    error: Callable[[Rejection], dict[str, Any]]
