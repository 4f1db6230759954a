"""The reasons why a run is not finished, as sentences: a pure function of a few figures.

Used by `status.py`. Must not: query the database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.contract.activity import EndpointCalls
from pipeline.contract.rollout import RunState
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE
from pipeline.store.capacity import Capacity
from pipeline.store.remote_sessions import SessionWaits

#: Error classes that are named.
_TOP_ERRORS = 3


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """The figures that the reasons follow from."""

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
    paused_version: int | None = None  #: the published version, where its mode is `pause`
    capacity: Capacity | None = None  #: of runs that begin groups only as they stay fresh
    sessions: SessionWaits | None = None  #: of runs on AgentCore


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """The figures that explain a trainer's wait."""

    wanted: int  #: groups, unless the batch is one of tokens
    groups: Mapping[str, int]  #: by state
    drops: Mapping[str, int]  #: by reason
    equal_rewards: Mapping[str, int]  #: groups dropped for their variance, by the reward
    leased_elsewhere: int
    wanted_tokens: int | None = None
    ready_tokens: int = 0  #: sampled tokens of the ready groups; 0 unless some are wanted
    too_small: int | None = None  #: ready groups with too few usable rollouts for a known batch

    @property
    def ready(self) -> int:
        """Ready groups that the batch can take."""
        return self.groups["ready"] - (self.too_small or 0)


def explain_trainer_wait(facts: TrainerFacts, run: WaitFacts) -> str:
    """Return the reason why a trainer waits, as one sentence with its numbers."""
    ready, n_open = facts.ready, facts.groups["open"]
    is_over = run.state in (RunState.FINISHED, RunState.CANCELLED)
    wanted, are_ready, is_enough = _demand(facts)
    if is_enough:
        can = f"{are_ready} and the trainer asks for {wanted}: it can pull"
        unless = ", unless its batch asks for more usable rollouts than they have"
        return f"{can}{unless if facts.too_small is None else ''}."
    if is_over and not ready and not facts.leased_elsewhere:
        return f"No group can become ready any more: {_other_groups(facts)}."
    parts = [f"{n_open} are open"]
    if run.running or run.dispatched:
        oldest = run.oldest_running_s
        since = "" if oldest is None else f", the oldest for {duration(oldest)}"
        parts[0] += f" with {run.running + run.dispatched} rollouts under way{since}"
    if run.queued:
        parts.append(f"{run.queued} rollouts are queued")
    if facts.leased_elsewhere:
        parts.append(f"{facts.leased_elsewhere} groups are leased to other consumers")
    parts.append(_other_groups(facts))
    if facts.wanted_tokens is None:
        asked = f"The trainer waits for {wanted} groups and {ready} are ready"
    else:
        asked = f"The trainer waits for {wanted} and {are_ready}"
    return f"{asked}: {', '.join(parts)}."


def _demand(facts: TrainerFacts) -> tuple[str, str, bool]:
    """Return what the trainer asks for, what is ready of it, and whether that is enough."""
    ready = facts.ready
    groups, are = ("group", "is") if ready == 1 else ("groups", "are")
    if facts.wanted_tokens is None:
        return str(facts.wanted), f"{ready} {groups} {are} ready", ready >= facts.wanted
    are_ready = f"{ready} {groups} with {facts.ready_tokens} {are} ready"
    is_enough = facts.ready_tokens >= facts.wanted_tokens
    return f"{facts.wanted_tokens} sampled tokens", are_ready, is_enough


def _other_groups(facts: TrainerFacts) -> str:
    others = f"{facts.groups['consumed']} are consumed"
    if facts.too_small:
        others = f"{facts.too_small} are ready with too few usable rollouts, {others}"
    if not facts.drops:
        return others
    drops = [f"{n} {reason}{_values(reason, facts)}" for reason, n in sorted(facts.drops.items())]
    return f"{others} and {sum(facts.drops.values())} dropped ({', '.join(drops)})"


def _values(reason: str, facts: TrainerFacts) -> str:
    if reason != "zero_variance" or not facts.equal_rewards:
        return ""
    return " [" + ", ".join(f"all {v}: {n}" for v, n in facts.equal_rewards.items()) + "]"


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
    if facts.paused_version is not None and n_open:
        yield (
            f"Its policy is paused at version {facts.paused_version}: model calls wait until the "
            f"trainer publishes the next one (rollout policy publish {facts.run} VERSION)."
        )
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
    yield from _unscored(facts.sessions)
    if facts.dispatched:
        # A run with a queue of its own needs workers that were started with that queue.
        is_own = facts.queue != DEFAULT_REQUEST_QUEUE
        where = f", those of: rollout worker --queues {facts.queue}" if is_own else ""
        yield f"{_rollouts(facts.dispatched)} on the way to a worker{where}."
    if facts.retry_waits:
        soon = duration(facts.next_retry_s or 0)
        verb = "waits" if facts.retry_waits == 1 else "wait"
        noun = "rollout" if facts.retry_waits == 1 else "rollouts"
        calls = _refused_calls(facts.sessions)
        yield f"{facts.retry_waits} {noun} {verb} for a retry, the next in {soon}{calls}."
    if facts.queued > facts.retry_waits:
        reason = _admission(facts.capacity) or _no_session(facts.sessions)
        yield f"{_rollouts(facts.queued - facts.retry_waits)} queued{reason}."
    if not facts.is_sealed:
        yield "Its prompts are still being enqueued, or that was interrupted."
    if facts.errors:
        top = sorted(facts.errors.items(), key=lambda item: (-item[1], item[0]))[:_TOP_ERRORS]
        yield f"Failed so far: {', '.join(f'{n} {name}' for name, n in top)}."


def _admission(capacity: Capacity | None) -> str:
    if capacity is None or capacity.free:
        return ""
    return (
        f" and would be too old when they are trained: {capacity.ahead} groups are ahead of them "
        f"({capacity.ready} ready, {capacity.leased} leased, {capacity.running} under way), and "
        f"the run begins {capacity.most} at most (max_staleness {capacity.max_staleness}, "
        f"{capacity.groups_per_step} groups per step); they wait for the trainer to pull, publish "
        "or commit"
    )


def _unscored(sessions: SessionWaits | None) -> Iterator[str]:
    if sessions is not None and sessions.unscored:
        is_one = sessions.unscored == 1
        wait = "rollout waits for its" if is_one else "rollouts wait for their"
        ended = "session has" if is_one else "sessions have"
        yield (
            f"{sessions.unscored} {wait} reward: the {ended} ended, and a worker scores what was "
            f"left with {sessions.reward}."
        )


def _no_session(sessions: SessionWaits | None) -> str:
    if sessions is None or sessions.most is None or sessions.own + sessions.others < sessions.most:
        return ""
    ended = f"; {sessions.ended} of them have ended and wait for their stop"
    return (
        f"; all {sessions.most} sessions (agentcore.max_sessions) are in use, {sessions.own} by "
        f"this run and {sessions.others} by other runs{ended if sessions.ended else ''}"
    )


def _refused_calls(sessions: SessionWaits | None) -> str:
    if sessions is None:
        return ""
    counts = {
        "AgentCore throttled the call": sessions.throttled,
        "the account had no free session": sessions.refused,
    }
    reasons = [f"for {n} of them {reason}" for reason, n in counts.items() if n]
    return f"; {', '.join(reasons)}, which uses no attempt" if reasons else ""


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
            failing = f"all {n} calls" if n > 1 else "the only call"
            yield (
                f"It waits for the model server {calls.base_url}: {failing} in the last minute "
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
