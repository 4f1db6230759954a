"""The activity of a run: its model calls, the failed ones among them, and its tool calls.

Each worker counts since its start and sends the sums in its heartbeats, so a lost or repeated
heartbeat changes nothing. The store keeps the sums of each process; `store/activity.py` adds them
up. Must not: count.
"""

from __future__ import annotations

from uuid import UUID

from pydantic import BaseModel, ConfigDict

#: Replies that look like a tool call and could not be read are counted under this name.
UNREADABLE_CALLS = "(unreadable call)"


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True)


class CallFailures(_Figures):
    """Tries of model calls that failed with one error code; the client may try the calls again.

    `code` is the error's, such as `connection`, `timeout`, `http_429`; `message` is that of the
    newest error, without secrets.
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
    """The activity of one run in one worker, or added up over all workers."""

    run_id: UUID
    endpoints: tuple[EndpointCalls, ...] = ()
    tools: dict[str, ToolCalls] = {}
