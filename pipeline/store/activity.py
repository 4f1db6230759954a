"""Model calls, failures and tool calls of a run, as workers report them in heartbeats.

Written with each heartbeat (`leases.keep_alive`), read by `status.py`. Each worker's figures are
stored with its process; the sums are over all workers that the store has a row of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.activity import CallFailures, EndpointCalls, RunActivity, ToolCalls
from pipeline.store.processes import ALIVE_S

_READ = text("""
SELECT activity -> CAST(:run_id AS text) AS activity,
       capacity > 0 AND last_seen_at > now() - make_interval(secs => :alive_s) AS is_alive
FROM processes WHERE activity ? CAST(:run_id AS text) ORDER BY last_seen_at
""")


def stored_activity(activity: Sequence[RunActivity]) -> dict[str, Any]:
    """Return a worker's figures by run, as they are stored with its process."""
    return {str(one.run_id): one.model_dump(mode="json") for one in activity}


def run_activity(connection: Connection, run_id: UUID) -> RunActivity:
    """Return a run's figures over all workers; `last_minute` counts those that are alive."""
    rows = connection.execute(_READ, {"run_id": str(run_id), "alive_s": ALIVE_S})
    return _added_up(run_id, [(RunActivity(**row.activity), row.is_alive) for row in rows])


def describe_failing_tools(activity: RunActivity, run: str) -> tuple[str, ...]:
    """Return one sentence for each tool that failed every time it was called."""
    return tuple(
        f"Tool {name} failed every time it was called ({calls.count} of {calls.count} calls); "
        f"see: rollout errors {run} --by tool"
        for name, calls in sorted(activity.tools.items())
        if calls.count and calls.errors == calls.count
    )


def describe_missing_calls(
    activity: RunActivity, *, succeeded: int, tokens: int
) -> tuple[str, ...]:
    """Return a sentence if rollouts of a run succeeded and no model call was recorded."""
    if not succeeded or tokens or activity.endpoints:
        return ()
    return (
        f"No model call was recorded, though {succeeded} rollouts succeeded: if the agent calls a "
        "model with a client of its own, these calls are not limited or counted, and no trainer "
        "can use them (docs/agents.md, require_model_calls).",
    )


@dataclass(slots=True)
class _Sum:
    count: int = 0
    last_minute: int = 0
    message: str = ""
    failures: dict[str, _Sum] = field(default_factory=lambda: {})

    def add(self, part: EndpointCalls | CallFailures, *, is_alive: bool) -> None:
        self.count += part.count
        self.last_minute += part.last_minute if is_alive else 0


def _added_up(run_id: UUID, parts: Iterable[tuple[RunActivity, bool]]) -> RunActivity:
    """Add up the figures of several workers, oldest first: the newest failure message is kept."""
    endpoints: dict[tuple[str, str], _Sum] = {}
    tools: dict[str, ToolCalls] = {}
    for part, is_alive in parts:
        for calls in part.endpoints:
            endpoint = endpoints.setdefault((calls.base_url, calls.model), _Sum())
            endpoint.add(calls, is_alive=is_alive)
            for failed in calls.failures:
                failure = endpoint.failures.setdefault(failed.code, _Sum())
                failure.add(failed, is_alive=is_alive)
                failure.message = failed.message
        for name, calls in part.tools.items():
            known = tools.get(name, ToolCalls())
            tools[name] = ToolCalls(
                count=known.count + calls.count, errors=known.errors + calls.errors
            )
    return RunActivity(
        run_id=run_id,
        endpoints=tuple(_endpoint(*key, total) for key, total in endpoints.items()),
        tools=tools,
    )


def _endpoint(base_url: str, model: str, total: _Sum) -> EndpointCalls:
    failures: list[dict[str, Any]] = [
        {"code": code, "count": n.count, "last_minute": n.last_minute, "message": n.message}
        for code, n in total.failures.items()
    ]
    return EndpointCalls(
        base_url=base_url,
        model=model,
        count=total.count,
        last_minute=total.last_minute,
        failures=tuple(CallFailures(**failure) for failure in failures),
    )
