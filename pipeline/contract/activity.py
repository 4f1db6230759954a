"""What a run does while its attempts run: model calls, which of them fail, tool calls.

Counted by each worker since its start and sent in its heartbeats: sums, so that a heartbeat that
is lost or comes twice changes nothing. Kept with the process, added up by `store/activity.py`.
"""

from __future__ import annotations

from uuid import UUID

from pydantic import BaseModel, ConfigDict


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True)


class CallFailures(_Figures):
    """Tries of model calls that failed in one way; the calls are tried again while that can help.

    `code` is that of the error, such as `connection`, `timeout`, `http_429`; `message` says what
    the newest one was, without secrets.
    """

    code: str
    count: int
    last_minute: int
    message: str


class EndpointCalls(_Figures):
    """Tries of model calls to one endpoint, failed ones included."""

    base_url: str
    model: str
    count: int
    last_minute: int
    failures: tuple[CallFailures, ...] = ()


class ToolCalls(_Figures):
    """Calls of one tool; `errors` of them failed."""

    count: int = 0
    errors: int = 0


class RunActivity(_Figures):
    """What the attempts of one run did in one worker, or in all of them together."""

    run_id: UUID
    endpoints: tuple[EndpointCalls, ...] = ()
    tools: dict[str, ToolCalls] = {}
