"""Leave to call a model, waited for in this process: what a worker's model client holds.

One `Limiter` per process, endpoint and model. All callers of the process share one pump: it asks
the ledger for everybody at once, and each caller then sleeps once, until its slot. Belongs to one
event loop. Must not decide who may call: the ledger does.
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress

from pipeline.contract.errors import InputError, NotAllowed, WaitTimeout
from pipeline.limits.clock_offset import ClockOffset
from pipeline.limits.in_force import LimitsInForce
from pipeline.limits.lease import Account, Lease
from pipeline.limits.ledger import Answer, Ask, Demand, Ledger, LedgerUnavailable, Returned
from pipeline.limits.pump import Pump
from pipeline.limits.status import explain_wait
from pipeline.limits.storm import Storm
from pipeline.limits.waiting import Line, Slot, Waiter

LEASE_S = 15.0
REFRESH_S = 1.0  #: between two asks at most, while calls are made: heartbeat and news of changes
IDLE_S = 30.0  #: without calls for this long, a process stops asking
GAP_S = 0.005  #: between two asks at least, so that callers gather
FLUSH_URGENT_S, FLUSH_S = 0.01, 0.25
EARLY_S = 0.0005  #: timers may fire this early
PAUSE_EDGE_S = 0.01  #: a slot this close to the end of a pause was reserved for its end
MOST_ESTIMATES = 500
RESUME_SPREAD_S = 1.0  #: after a pause without a rate limit calls start over this time
UNTOLD_BACKOFF_S = 1.0  #: held back by this until the ledger has said how long


class Limiter:
    """Requests, tokens and concurrency of one endpoint and model, shared through a ledger.

    Limits of the whole endpoint hold too; the ledger minds both in one ask.

    Args:
        process: Name of this process among all that share the ledger.
        lease_s: Seconds after which the concurrency units of a silent process are given away.
    """

    def __init__(
        self, ledger: Ledger, *, endpoint: str, model: str, process: str, lease_s: float = LEASE_S
    ) -> None:
        self.name = f"{model} at {endpoint}"
        self.storm = Storm()
        self._ledger = ledger
        self._process = process
        self._lease_s = lease_s
        self._pump = Pump(self._sync, self._due, name=self.name)
        self._account = Account()
        self._lines: dict[str, Line] = {}
        self._told: dict[str, float] = {}
        self._unclaimed: list[Returned] = []
        self._offset = ClockOffset()
        self._limits = LimitsInForce()
        self._last: Answer | None = None
        self._is_forgotten = False
        self._is_closed = False
        self._used_at = self._synced_at = -math.inf
        self._ask_at = self._gather_at = -math.inf
        self._flush_at = math.inf
        self._pause_until = -math.inf
        self._backoff_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Count the callers of this process that wait."""
        return sum(len(line.waiters) for line in self._lines.values())

    @property
    def in_use(self) -> int:
        """Count the leases of this process that are not released."""
        return self._account.in_use

    @property
    def ledger_calls(self) -> int:
        """Count the asks of this process so far."""
        return self._ledger.calls

    async def acquire(
        self,
        *,
        run: str,
        weight: float = 1.0,
        estimated_tokens: int,
        timeout_s: float | None = None,
    ) -> Lease:
        """Wait until a call may be made, for as long as it takes.

        Args:
            run: Calls of one run share what the run is due.
            weight: The run's share against that of other runs, while they contend.
            estimated_tokens: Prompt and response together; settled afterwards.
            timeout_s: Gives up after this long; by default never.

        Raises:
            WaitTimeout: the caller's own timeout passed; it says what the call waited for.
            InputError: a weight or an estimate that means nothing.
            NotAllowed: the limiter was closed.
        """
        self._check(weight, estimated_tokens)
        lease = self.acquire_at_once(run=run, estimated_tokens=estimated_tokens)
        if lease is not None:
            return lease
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiter = Waiter(estimated_tokens, now, loop.create_future())
        self._enqueue(run, weight, waiter)
        is_served = False
        try:
            async with asyncio.timeout(timeout_s):
                lease = await waiter.future
            is_served = True
            return lease
        except TimeoutError:
            raise WaitTimeout(
                f"No leave to call {self.name} within {timeout_s:g} s.", why=self.describe()
            ) from None
        finally:
            if not is_served:
                self._withdraw(run, waiter)

    def acquire_at_once(self, *, run: str, estimated_tokens: int) -> Lease | None:
        """Return leave to call where no limit is set, None where a call may have to wait."""
        self._used_at = now = asyncio.get_running_loop().time()
        if self._is_closed or not self._passes_freely(now):
            return None
        return self._lease(run, estimated_tokens, now, now)

    async def note_rate_limited(self, retry_after_s: float | None = None) -> None:
        """Hold everybody's calls: the endpoint answered 429.

        Args:
            retry_after_s: What it asked for; without it 1 s, doubled while it goes on.
        """
        now = asyncio.get_running_loop().time()
        asked_s = retry_after_s if retry_after_s and math.isfinite(retry_after_s) else 0.0
        self._backoff_s = max(self._backoff_s or 0.0, asked_s, 0.0)
        self._pause(now + (self._backoff_s or UNTOLD_BACKOFF_S))
        self._flush_at = now
        self._pump.wake()

    def describe(self) -> str:
        """Say for a person what calls wait for now."""
        loop_time = asyncio.get_running_loop().time()
        return explain_wait(
            self.name,
            waiting_here=self.waiting,
            last=self._last,
            limits=self._limits,
            outage=self._pump.outage,
            pause_s=max(0.0, self._pause_until - loop_time),
            next_look_s=max(0.0, self._ask_at - loop_time),
        )

    async def close(self) -> None:
        """Give everything back; callers that still wait are refused."""
        self._is_closed = True
        await self._pump.stop()
        if self._timer:
            self._timer.cancel()
        for line in self._lines.values():
            for waiter in line.waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(
                        NotAllowed(f"The limiter of {self.name} was closed.")
                    )
            line.waiters.clear()
        if self._last is not None:
            with suppress(LedgerUnavailable):
                await self._ledger.sync(self._ask(held=0))

    def _check(self, weight: float, estimated_tokens: int) -> None:
        if self._is_closed:
            raise NotAllowed(f"The limiter of {self.name} was closed.")
        if not (math.isfinite(weight) and weight > 0) or estimated_tokens < 0:
            raise InputError(
                "A call needs a weight above 0 and an estimate of at least 0 tokens.",
                why=f"weight={weight} estimated_tokens={estimated_tokens}",
            )

    def _passes_freely(self, now: float) -> bool:
        """Say whether no limit is known to be set; costs no call of the ledger."""
        if self._last is None or now < self._pause_until or not self._limits.is_unlimited:
            return False
        is_fresh = now - self._synced_at < 3 * REFRESH_S
        # An outage cannot have set a limit where there was none.
        return is_fresh or self._pump.outage is not None

    def _lease(self, run: str, tokens: int, since: float, now: float) -> Lease:
        self._account.in_use += 1
        return Lease(run, tokens, now, now - since, self._account, self._account_changed)

    def _enqueue(self, run: str, weight: float, waiter: Waiter) -> None:
        line = self._lines.get(run)
        if line is None:
            line = self._lines[run] = Line(run, weight)
            self._ask_now()  # A run that did not wait yet may be due at once.
        line.weight = weight
        self._gather(line, waiter.since)
        line.waiters.append(waiter)
        self._pump.wake()

    def _ask_now(self) -> None:
        self._ask_at = self._gather_at = -math.inf

    def _gather(self, line: Line, now: float) -> None:
        """Let callers gather while slots of their line are still to come."""
        left_s = line.slots[-1].at - now if line.slots else 0.0
        gather_at = now + min(self._limits.pace.horizon_s / 4, left_s / 2)
        self._gather_at = min(self._gather_at, gather_at)

    def _withdraw(self, run: str, waiter: Waiter) -> None:
        """Forget a caller that gave up; its slot goes to the next, or back."""
        loop_time = asyncio.get_running_loop().time()
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            # Served in the same tick in which it gave up.
            self._account.in_use -= 1
            line = self._lines.setdefault(run, Line(run, 1.0))
            line.reserve(
                Slot(loop_time, -math.inf, waiter.tokens, loop_time + self._limits.pace.late_s)
            )
            self._hand_out()
        elif run in self._lines and waiter in self._lines[run].waiters:
            self._lines[run].waiters.remove(waiter)
        if not self._is_closed:
            self._flush_at = min(self._flush_at, loop_time + FLUSH_URGENT_S)
            self._pump.wake()

    def _account_changed(self) -> None:
        """Report soon where somebody waits for it, else with the next ask."""
        last = self._last
        if self._is_closed or last is None or self._limits.is_unlimited:
            return
        now = asyncio.get_running_loop().time()
        if last.is_contended:
            if last.reason == "concurrency":
                self._ask_now()
            self._flush_at = min(self._flush_at, now + FLUSH_URGENT_S)
        elif last.waiting or 2 * last.in_flight >= last.cap > 0:
            self._flush_at = min(self._flush_at, now + FLUSH_S)
        else:
            return
        self._pump.wake()

    def _due(self) -> float:
        is_active = self._lines or self._account.in_use
        now = asyncio.get_running_loop().time()
        due = self._flush_at
        if is_active or now - self._used_at < IDLE_S:
            due = min(due, self._synced_at + min(REFRESH_S, self._lease_s / 4))
        if any(line.unreserved for line in self._lines.values()):
            due = min(due, max(self._ask_at, self._gather_at))
        return max(due, self._synced_at + GAP_S)

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        if self._is_forgotten:
            await self._limits.restore(self._ledger)
            self._is_forgotten = False
        self._flush_at = self._gather_at = math.inf
        backoff_s, self._backoff_s = self._backoff_s, None
        ask = self._ask(backoff_s=backoff_s)
        sent_at = loop.time()
        try:
            answer = await self._ledger.sync(ask)
        except LedgerUnavailable:
            self._account.take_back(ask.tokens_owed)
            self._ask_now()
            self._backoff_s = backoff_s if self._backoff_s is None else self._backoff_s
            raise
        now = self._synced_at = loop.time()
        self._offset.note(sent_at=sent_at, received_at=now, ledger_at=answer.now)
        self._apply(ask, answer, now)

    def _ask(self, *, held: int | None = None, backoff_s: float | None = None) -> Ask:
        returned, self._unclaimed = self._unclaimed, []
        for line in list(self._lines.values()):
            returned += [Returned(line.run, s.ledger_at, s.tokens) for s in line.take_surplus()]
            if not line.waiters:
                del self._lines[line.run]
        demands = [
            Demand(line.run, line.weight, line.unreserved, line.estimates(MOST_ESTIMATES))
            for line in self._lines.values()
        ]
        gone = [Demand(r, w, 0, ()) for r, w in self._told.items() if r not in self._lines]
        reserved = sum(len(line.slots) for line in self._lines.values())
        tokens_owed, outcomes = self._account.take()
        return Ask(
            process=self._process,
            lease_s=self._lease_s,
            version=self._limits.version,
            wide_version=self._limits.wide_version,
            held=self._account.in_use + reserved if held is None else held,
            demands=tuple(demands + gone),
            returned=tuple(slot for slot in returned if slot.at > 0),
            tokens_owed=tokens_owed,
            outcomes=outcomes,
            backoff_s=backoff_s,
        )

    def _apply(self, ask: Ask, answer: Answer, now: float) -> None:
        self._told = {demand.run: demand.weight for demand in ask.demands if demand.waiting}
        if self._limits.are_lost(answer):
            # The ledger lost its memory: nothing it grants now is limited by anything.
            self._is_forgotten = True
            self._flush_at = now
            return
        self._last = answer
        self._adopt(answer)
        if self._backoff_s is None:
            self._pause_until = -math.inf if answer.pause_s == 0 else self._pause_until
            if answer.pause_s > 0:
                self._pause(self._offset.local(answer.now + answer.pause_s))
        for grant in answer.grants:
            demand = ask.demands[grant.demand]
            self._reserve(demand, answer, grant.delay_s, grant.tokens)
        self._ask_at = now + answer.retry_in_s if answer.reason else -math.inf
        if answer.reason or any(d.waiting > len(d.estimates) for d in ask.demands):
            self._gather_at = -math.inf
        if any(len(line.slots) > len(line.waiters) for line in self._lines.values()):
            self._flush_at = now  # Somebody gave up while the ledger was asked.
        self._hand_out()

    def _adopt(self, answer: Answer) -> None:
        if self._limits.adopt(answer):
            for line in self._lines.values():
                line.slots.clear()  # Reserved under limits that no longer hold.
            self._gather_at = -math.inf

    def _pause(self, until: float) -> None:
        self._pause_until = until
        dropped = sum(line.drop_before(until - PAUSE_EDGE_S) for line in self._lines.values())
        if dropped:
            self._ask_now()

    def _reserve(self, demand: Demand, answer: Answer, delay_s: float, tokens: int) -> None:
        ledger_at = answer.now + delay_s
        at, expires_at = self._offset.local(ledger_at), math.inf
        if self._limits.pace.is_rated:
            expires_at = at + self._limits.pace.late_s + self._offset.lag_s
        elif answer.pause_s > 0:
            at += random.uniform(0, RESUME_SPREAD_S)
        line = self._lines.setdefault(demand.run, Line(demand.run, demand.weight))
        line.reserve(Slot(at, ledger_at, tokens, expires_at))

    def _hand_out(self) -> None:
        """Give the slots that are due to the callers that are first."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for line in self._lines.values():
            self._hand_out_line(line, now)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        soonest = min((line.slots[0].at for line in self._lines.values() if line.slots), default=0)
        if soonest:
            self._timer = loop.call_at(soonest, self._hand_out)

    def _hand_out_line(self, line: Line, now: float) -> None:
        due = 0
        while line.slots and line.slots[0].at <= now + EARLY_S:
            slot = line.slots.pop(0)
            due += 1
            if due == 1 and self._limits.pace.is_rated:
                self._offset.note_lateness(max(0.0, now - slot.at))
            if slot.expires_at < now:
                # Too late: calls that bunch up after a stall would break the limit.
                self._ask_now()
                self._pump.wake()
            elif waiter := self._first_live(line):
                self._account.tokens_owed += waiter.tokens - slot.tokens
                waiter.future.set_result(self._lease(line.run, waiter.tokens, waiter.since, now))
            else:
                self._unclaimed.append(Returned(line.run, slot.ledger_at, slot.tokens))

    @staticmethod
    def _first_live(line: Line) -> Waiter | None:
        while line.waiters:
            waiter = line.waiters.popleft()
            if not waiter.future.done():
                return waiter
        return None
