"""The reasons why a run is not finished, as sentences: a pure function of a few figures.

Used by `status.py`. Must not: query the database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.contract.activity import EndpointCalls
from pipeline.contract.rollout import RunState
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE

#: Error classes that are named.
_TOP_ERRORS = 3


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """The figures that the reasons are derived from."""

    run: str
    state: RunState
    state_reason: str | None
    is_sealed: bool
    queued: int
    dispatched: int
    running: int
    oldest_running_s: float | None
    retry_waits: int  #: of the queued ones, those whose time has not come
    next_retry_s: float | None
    live_workers: int
    live_collectors: int
    errors: Mapping[str, int]
    endpoints: Sequence[EndpointCalls] = ()
    queue: str = DEFAULT_REQUEST_QUEUE
    started: Collection[str] = ()  #: kinds of processes that the asking command started itself


def explain_wait(facts: WaitFacts) -> tuple[str, ...]:
    """Return one sentence for each reason why a run is not finished."""
    if facts.state is RunState.FINISHED:
        return ()
    return tuple(_sentences(facts))


def _sentences(facts: WaitFacts) -> Iterator[str]:
    n_open = facts.queued + facts.dispatched + facts.running
    if facts.state is RunState.PAUSED:
        because = f" because {facts.state_reason}" if facts.state_reason else ""
        yield f"It is paused{because}; go on with: rollout continue {facts.run}."
    if facts.state is RunState.CANCELLED:
        yield "It is cancelled."
    if n_open and not facts.live_collectors:
        yield _missing("controller", facts.started)
    if n_open and not facts.live_workers:
        yield _missing("worker", facts.started)
    yield from _failing_calls(facts.endpoints)
    if facts.running:
        oldest = ""
        if facts.oldest_running_s is not None:
            oldest = f", the oldest for {duration(facts.oldest_running_s)}"
        yield f"{_rollouts(facts.running)} running{oldest}."
    if facts.dispatched:
        # A run with a queue of its own needs workers that were started with that queue.
        is_own = facts.queue != DEFAULT_REQUEST_QUEUE
        where = f", those of: rollout worker --queues {facts.queue}" if is_own else ""
        yield f"{_rollouts(facts.dispatched)} on the way to a worker{where}."
    if facts.retry_waits:
        soon = duration(facts.next_retry_s or 0)
        verb = "waits" if facts.retry_waits == 1 else "wait"
        noun = "rollout" if facts.retry_waits == 1 else "rollouts"
        yield f"{facts.retry_waits} {noun} {verb} for a retry, the next in {soon}."
    if facts.queued > facts.retry_waits:
        yield f"{_rollouts(facts.queued - facts.retry_waits)} queued."
    if not facts.is_sealed:
        yield "Its prompts are still being enqueued, or that was interrupted."
    if facts.errors:
        top = sorted(facts.errors.items(), key=lambda item: (-item[1], item[0]))[:_TOP_ERRORS]
        yield f"Failed so far: {', '.join(f'{n} {name}' for name, n in top)}."


def _missing(kind: str, started: Collection[str]) -> str:
    if kind in started:
        return f"The {kind} that this command started has not reported within the last 30 s."
    return f"No {kind} reports; start one with: rollout {kind} (or rollout up)."


def _failing_calls(endpoints: Iterable[EndpointCalls]) -> Iterator[str]:
    for calls in endpoints:
        failures = sorted(calls.failures, key=lambda failed: -failed.last_minute)
        n = sum(failed.last_minute for failed in failures)
        if not n:
            continue
        reason = f"failed ({failures[0].message}); they are tried again"
        if n >= calls.last_minute:
            told = f"all {n} calls" if n > 1 else "the only call"
            yield (
                f"It waits for the model server {calls.base_url}: {told} in the last minute "
                f"{reason}."
            )
        else:
            yield (
                f"{n} of {calls.last_minute} calls to the model server {calls.base_url} in the "
                f"last minute {reason}."
            )


def _rollouts(n: int) -> str:
    return "1 rollout is" if n == 1 else f"{n} rollouts are"


def duration(seconds: float) -> str:
    """Return a time for people, in one unit."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    if seconds < 7200:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
