"""The ledger of one process: the same rules as the Lua scripts, in Python, without Redis.

For deployments without a Redis URL and for tests. Limits then hold per worker process only; who
composes the worker says so (`pool.py` warns). Mirrors `grant.lua`, and a test compares the two.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pipeline.limits.concurrency import AdaptiveCap
from pipeline.limits.fair_share import FairShare, Flow
from pipeline.limits.ledger import Answer, Ask, Grant, Reason
from pipeline.limits.settings import LimitSettings, Pace
from pipeline.limits.status import ANY_MODEL, LimitStatus, endpoint_key
from pipeline.limits.token_bucket import TokenBucket

BACKOFF_BASE_S, BACKOFF_MAX_S, RETRY_AFTER_MAX_S = 1.0, 60.0, 300.0
BACKOFF_MEMORY_S = 10.0  #: a 429 this soon after a pause doubles the next one
CONTENDED_S = 2.0
RETRY_MIN_S, RETRY_MAX_S = 0.02, 1.0  #: between looks for a free concurrency unit
SILENT_S = 0.4  #: a waiting process is given up this long after twice its next look


class _Free(NamedTuple):
    at: float
    tokens: int


class _Found(NamedTuple):
    """A slot that a book could give: when, a slot handed back that it is, what bounds it."""

    at: float
    free: _Free | None
    limit: Reason


class MemoryLedger:
    """The limits of one endpoint and model, kept in this process.

    Args:
        clock: Seconds, never going back.
        model: Its name.
        wide: The ledger of the whole endpoint; its limits hold too.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        wide: MemoryLedger | None = None,
    ) -> None:
        self._model, self._wide = model, wide
        self.calls = 0
        self.settings: LimitSettings | None = None
        self.version = 0
        self.granted = 0
        self._set_at = self._granted_at = 0.0
        self._clock = clock
        self._pace = Pace()
        self._share = FairShare()
        self._cap = AdaptiveCap()
        self._due: dict[Flow, float] = {}
        self._held: dict[str, int] = {}
        self._leases: dict[str, float] = {}
        self._pause_until = 0.0
        self._backoffs = 0
        self._full_at = -CONTENDED_S
        self._reset()

    def configure(self, settings: LimitSettings) -> None:
        """Put other limits in force, from the next ask of each process on."""
        self.settings = settings
        self.version += 1
        self._set_at = self._clock()
        self._pace = settings.pace()
        self._reset()

    async def restore(self, settings: LimitSettings) -> bool:
        """Put limits in force where none were ever set; say whether it did."""
        if self.version:
            return False
        self.configure(settings)
        return True

    async def restore_wide(self, settings: LimitSettings) -> bool:
        """Put limits of the whole endpoint in force where none were ever set."""
        return self._wide is not None and await self._wide.restore(settings)

    async def sync(self, ask: Ask) -> Answer:
        """Report and ask in one step."""
        now, wide = self._clock(), self._wide
        books = [_Part(self, ask)]
        self._begin(ask, now)
        if ask.backoff_s is not None:
            self._back_off(ask.backoff_s, now)
        if wide is not None and wide.settings is not None and not wide.settings.is_unlimited:
            # In the endpoint's book each of its models counts as a process.
            told = replace(ask, process=f"{ask.process}|{self._model}", version=ask.wide_version)
            wide._begin(told, now)
            books.append(_Part(wide, told))
        grants, reason, retry_in_s, by = _grant(books, now)
        for book, told in books:
            book._close(told, grants, retry_in_s, now)
        wide_version = wide.version if wide else 0
        return Answer(
            now=now,
            version=self.version,
            settings=self.settings if ask.version != self.version else None,
            wide_version=wide_version,
            wide_settings=wide.settings if wide and ask.wide_version != wide_version else None,
            is_wide=by is wide,
            grants=grants,
            retry_in_s=retry_in_s,
            reason=reason,
            pause_s=max(0.0, self._pause_until - now),
            waiting=sum(by._share.waiting.values()),
            in_flight=by._in_flight,
            cap=by._cap.in_force(by._pace),
            is_contended=now - by._full_at < CONTENDED_S,
            granted=self.granted,
            calls=self.calls,
            unused_s=self._unused_s(now),
        )

    def _begin(self, ask: Ask, now: float) -> None:
        self.calls += 1
        self._drop_gone(now)
        self._book(ask, now)
        for demand in ask.demands:
            flow = (demand.run, ask.process)
            self._share.tell(flow, weight=demand.weight, waiting=demand.waiting)

    def _close(self, ask: Ask, grants: list[Grant], retry_in_s: float, now: float) -> None:
        self._hold(ask, ask.held + len(grants), now)
        self._settle_demands(ask, grants, due=now + 2 * retry_in_s + SILENT_S)
        self._share.forget_overtaken()
        self.granted += len(grants)
        if grants:
            self._granted_at = now

    def _unused_s(self, now: float) -> float | None:
        is_limited = self.settings is not None and not self.settings.is_unlimited
        return now - self._set_at if is_limited and self._granted_at < self._set_at else None

    @property
    def _in_flight(self) -> int:
        return sum(self._held.values())

    def _reset(self) -> None:
        self._requests, self._tokens = TokenBucket(), TokenBucket()
        self._free: list[_Free] = []
        self._cap.cap, self._cap.is_steady = 0.0, False

    def _drop_gone(self, now: float) -> None:
        for process in [p for p, until in self._leases.items() if until <= now]:
            del self._leases[process], self._held[process]
        for flow in [flow for flow, due in self._due.items() if due <= now]:
            del self._due[flow]
            self._share.leave(flow)

    def _book(self, ask: Ask, now: float) -> None:
        """Take in what ended since the last ask, before anything is granted."""
        in_flight = self._in_flight
        self._cap.learn(ask.outcomes, pace=self._pace, in_flight=in_flight, now=now)
        self._hold(ask, ask.held, now)
        self._free = [free for free in self._free if free.at >= now]
        # What was reserved or estimated under other limits means nothing under these.
        if ask.version == self.version:
            self._tokens.owe(ask.tokens_owed * self._pace.token_interval_s)
            for returned in ask.returned:
                if self._pace.is_rated and returned.at >= max(now, self._pause_until):
                    insort(self._free, _Free(returned.at, returned.tokens))

    def _hold(self, ask: Ask, held: int, now: float) -> None:
        if held > 0:
            self._held[ask.process] = held
            self._leases[ask.process] = now + ask.lease_s
        else:
            self._held.pop(ask.process, None)
            self._leases.pop(ask.process, None)

    def _back_off(self, asked_s: float, now: float) -> None:
        if asked_s > 0:
            until = now + min(asked_s, RETRY_AFTER_MAX_S)
        elif now < self._pause_until:
            return  # The same burst of 429s; it is one reason to pause, not many.
        else:
            is_again = self._pause_until and now - self._pause_until < BACKOFF_MEMORY_S
            self._backoffs = self._backoffs + 1 if is_again else 0
            until = now + min(BACKOFF_BASE_S * 2**self._backoffs, BACKOFF_MAX_S)
        if until > self._pause_until:
            self._pause_until = until
            self._free = []
            pace = self._pace
            self._requests.empty(
                at=until, tolerance_s=pace.request_tolerance_s - pace.request_interval_s
            )
            self._tokens.empty(at=until, tolerance_s=pace.token_tolerance_s)

    def _cost_s(self, tokens: int) -> float:
        """Give a call's cost as seconds of the scarcest capacity."""
        pace, cap = self._pace, self._cap.in_force(self._pace)
        return max(
            pace.request_interval_s,
            tokens * pace.token_interval_s,
            pace.horizon_s / cap if cap else 0.0,
        )

    def _next_slot(self, tokens: int, now: float) -> _Found:
        if self._free and tokens <= self._free[0].tokens:
            return _Found(self._free[0].at, self._free[0], Reason.REQUESTS)
        return self._bucket_slot(tokens, now)

    def _bucket_slot(self, tokens: int, now: float) -> _Found:
        pace = self._pace
        by_request = by_tokens = now
        if pace.request_interval_s:
            by_request = self._requests.earliest(
                pace.request_interval_s, tolerance_s=pace.request_tolerance_s, now=now
            )
        if pace.token_interval_s:
            by_tokens = self._tokens.earliest(
                tokens * pace.token_interval_s, tolerance_s=pace.token_tolerance_s, now=now
            )
        slot = max(by_request, by_tokens, self._pause_until)
        return _Found(slot, None, Reason.TOKENS if by_tokens > by_request else Reason.REQUESTS)

    def _refusal(self, flow: Flow, found: _Found, granted: int, now: float) -> Reason:
        pace, cap = self._pace, self._cap.in_force(self._pace)
        if self._pause_until > now + pace.horizon_s:
            return Reason.BACKOFF
        if cap and self._in_flight + granted >= cap:
            self._full_at = now
            return Reason.CONCURRENCY
        self._share.advance()
        ahead = self._share.tag(flow) - self._share.virtual
        if ahead > self._share.lead(pace.horizon_s) + 1e-9:
            return Reason.SHARE
        return found.limit if found.at > now + pace.horizon_s else Reason.NONE

    def _next_look_s(self, flow: Flow, reason: Reason, slot_in_s: float, tokens: int) -> float:
        rank, cap = self._share.rank(flow), self._cap.in_force(self._pace)
        if reason is Reason.CONCURRENCY:
            turn_s = (rank + 1) * (self._cap.latency_s or 0.1) / cap
            return min(max(turn_s, RETRY_MIN_S), RETRY_MAX_S)
        horizon_s = self._pace.horizon_s
        return max(slot_in_s - horizon_s + rank * self._cost_s(tokens), horizon_s / 2)

    def _take(self, flow: Flow, slot: float, free: _Free | None, tokens: int) -> None:
        pace = self._pace
        self._share.charge(flow, self._cost_s(tokens))
        if free:
            self._free.pop(0)
            self._tokens.owe((tokens - free.tokens) * pace.token_interval_s)
            return
        if pace.request_interval_s:
            self._requests.take(
                pace.request_interval_s, at=slot, tolerance_s=pace.request_tolerance_s
            )
        if pace.token_interval_s:
            self._tokens.take(
                tokens * pace.token_interval_s, at=slot, tolerance_s=pace.token_tolerance_s
            )

    def _settle_demands(self, ask: Ask, grants: list[Grant], *, due: float) -> None:
        for index, demand in enumerate(ask.demands):
            flow = (demand.run, ask.process)
            left = demand.waiting - sum(grant.demand == index for grant in grants)
            self._share.tell(flow, weight=demand.weight, waiting=left)
            self._due.pop(flow, None)
            if left > 0:
                self._due[flow] = due


class _Part(NamedTuple):
    """A book that an ask goes through, and the ask as this book knows it."""

    book: MemoryLedger
    ask: Ask

    def flow(self, demand: int) -> Flow:
        return self.ask.demands[demand].run, self.ask.process


def _grant(books: list[_Part], now: float) -> tuple[list[Grant], Reason, float, MemoryLedger]:
    """Reserve slots, for the flow that is furthest behind first, until one must wait.

    With two books both must have the slot. Returns also what the last one waits for, when to look
    again, and which book says so.
    """
    own, demands = books[0], books[0].ask.demands
    grants: list[Grant] = []
    taken = [0] * len(demands)
    while True:
        open_ = [i for i, demand in enumerate(demands) if taken[i] < len(demand.estimates)]
        if not open_:
            return grants, Reason.NONE, 0.0, own.book
        index = min(open_, key=lambda i: own.book._share.tag(own.flow(i)))
        tokens = demands[index].estimates[taken[index]]
        found = _find_slots(books, tokens, now)
        for part, slot in zip(books, found, strict=True):
            book, flow = part.book, part.flow(index)
            reason = book._refusal(flow, slot, len(grants), now)
            if reason:
                look_s = book._next_look_s(flow, reason, slot.at - now, tokens)
                return grants, reason, look_s, book
        at = max(slot.at for slot in found)
        for part, slot in zip(books, found, strict=True):
            part.book._take(part.flow(index), at, slot.free, tokens)
        grants.append(Grant(index, at - now, tokens))
        taken[index] += 1


def _find_slots(books: list[_Part], tokens: int, now: float) -> list[_Found]:
    found = [part.book._next_slot(tokens, now) for part in books]
    # A slot that was handed back is taken at its own time or not at all.
    if len({slot.at for slot in found}) > 1 and any(slot.free for slot in found):
        found = [part.book._bucket_slot(tokens, now) for part in books]
    return found


class MemoryLimitStore:
    """Ledgers of this process, by endpoint and model; the interface of `LimitStore`."""

    is_shared = False

    def __init__(self) -> None:
        self._ledgers: dict[tuple[str, str], MemoryLedger] = {}

    def ledger(self, endpoint: str, model: str) -> MemoryLedger:
        """Give the one ledger of this endpoint and model."""
        key = endpoint_key(endpoint, model)
        if key not in self._ledgers:
            wide = None if key[1] == ANY_MODEL else self.ledger(endpoint, ANY_MODEL)
            self._ledgers[key] = MemoryLedger(model=key[1], wide=wide)
        return self._ledgers[key]

    async def set(self, endpoint: str, model: str, settings: LimitSettings) -> None:
        """Put limits in force."""
        self.ledger(endpoint, model).configure(settings)

    async def seed(self, endpoint: str, model: str, settings: LimitSettings) -> bool:
        """Put limits in force where none were ever set; say whether it did."""
        return await self.ledger(endpoint, model).restore(settings)

    async def show(self) -> list[LimitStatus]:
        """List the limits and how they are used now."""
        rows: list[LimitStatus] = []
        for (endpoint, model), ledger in sorted(self._ledgers.items()):
            if model == ANY_MODEL and not ledger.version:
                continue
            answer = await ledger.sync(Ask(process=""))
            until = datetime.now(UTC) + timedelta(seconds=answer.pause_s)
            rows.append(LimitStatus.of(endpoint, model, answer, until))
        return rows

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
