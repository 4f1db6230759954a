"""The wait of the callers of one process for permission to call a model.

One `Limiter` per process, endpoint and model. One sync asks Redis for all callers of the process;
each caller then sleeps once, until its slot. Belongs to one event loop. Must not decide which call
may start: the script in Redis does.
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.limits.clock_offset import ClockOffset
from pipeline.limits.known_limits import KnownLimits
from pipeline.limits.lease import CallStatus, Lease
from pipeline.limits.rate_limit_detector import RateLimitDetector
from pipeline.limits.shared_limits import LimitsUnavailable, SharedLimits
from pipeline.limits.sync_loop import SyncLoop
from pipeline.limits.sync_messages import (
    Demand,
    Grant,
    ReturnedSlot,
    SyncReply,
    SyncRequest,
    Usage,
    WaitReason,
)
from pipeline.limits.wait_queue import Slot, Waiter, WaitQueue

REFRESH_S = 1.0  #: longest time between two syncs while calls are made: lease, changed limits
IDLE_S = 30.0  #: without calls for this long, a process stops syncing
GAP_S = 0.005  #: shortest time between two syncs, so that callers gather
FLUSH_URGENT_S, FLUSH_S = 0.01, 0.25
EARLY_S = 0.0005  #: timers may fire this early
PAUSE_EDGE_S = 0.01  #: a slot this close to the end of a pause was reserved for that end
MAX_ESTIMATES = 500
RESUME_SPREAD_S = 1.0  #: after a pause without a rate limit, calls start at random times within
UNCONFIRMED_PAUSE_S = 1.0  #: length of a pause until Redis has replied with its length


class Limiter:
    """Requests, tokens and concurrency of one endpoint and model, shared through Redis.

    Args:
        shared: The limits of the model; those of its whole endpoint hold too.
        name: For log lines and errors.
        process: Name of this process among all that share the limits.
        lease_s: Seconds after which the concurrency units of a silent process are given away.
    """

    def __init__(self, shared: SharedLimits, *, name: str, process: str, lease_s: float) -> None:
        self.shared = shared
        self.in_flight = 0
        self._name = name
        self._process = process
        self._lease_s = lease_s
        self._sync_loop = SyncLoop(self._sync, self._due, name=name)
        self._detector = RateLimitDetector()
        self._usage = Usage()
        self._queues: dict[str, WaitQueue] = {}
        self._reported: dict[str, float] = {}  #: runs that Redis counts as waiting: weight
        self._returned: list[ReturnedSlot] = []
        self._offset = ClockOffset()
        self._limits = KnownLimits()
        self._last: SyncReply | None = None
        self._must_restore = False
        self._is_closed = False
        self._used_at = self._synced_at = -math.inf
        self._ask_at = self._gather_at = -math.inf
        self._flush_at = math.inf
        self._pause_until = -math.inf
        self._backoff_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, *, run: str, weight: float = 1.0, estimated_tokens: int) -> Lease:
        """Wait until a call may be made, without a time limit.

        Args:
            run: Calls of one run share the run's part of the limits.
            weight: The run's share against that of other runs, while they contend.
            estimated_tokens: Prompt and response together; corrected when the lease is settled.

        Raises:
            InputError: The weight is not above 0, or the estimate is negative.
            NotAllowed: The limiter was closed.
        """
        if self._is_closed:
            raise self._closed_error()
        if not (math.isfinite(weight) and weight > 0) or estimated_tokens < 0:
            raise InputError(
                "A call needs a weight above 0 and an estimate of at least 0 tokens.",
                why=f"weight={weight} estimated_tokens={estimated_tokens}",
            )
        lease = self.acquire_at_once(estimated_tokens)
        if lease is not None:
            return lease
        waiter = Waiter(estimated_tokens, asyncio.get_running_loop().create_future())
        self._enqueue(run, weight, waiter)
        try:
            return await waiter.future
        except BaseException:
            self._withdraw(run, waiter)
            raise

    def acquire_at_once(self, estimated_tokens: int) -> Lease | None:
        """Return a lease where no limit is set, None where a call may have to wait."""
        self._used_at = now = asyncio.get_running_loop().time()
        if self._is_closed or not self._passes_freely(now):
            return None
        return self._lease(estimated_tokens, now)

    def note_rate_limited(self, retry_after_s: float | None) -> None:
        """Pause the calls of all processes if most calls of this one are answered 429 now.

        A single 429 delays only the call that met it, and lowers the adaptive cap.
        """
        if self._detector.note_refused():
            self.pause(retry_after_s)

    def pause(self, retry_after_s: float | None) -> None:
        """Pause the calls of all processes.

        Args:
            retry_after_s: Length of the pause; None: 1 s, doubled for each pause that follows soon.
        """
        now = asyncio.get_running_loop().time()
        asked_s = retry_after_s if retry_after_s and math.isfinite(retry_after_s) else 0.0
        self._backoff_s = max(self._backoff_s or 0.0, asked_s, 0.0)
        self._hold_until(now + (self._backoff_s or UNCONFIRMED_PAUSE_S))
        self._flush_at = now
        self._sync_loop.wake()

    async def close(self) -> None:
        """Give all units back; callers that still wait get an error."""
        self._is_closed = True
        await self._sync_loop.stop()
        if self._timer:
            self._timer.cancel()
        for queue in self._queues.values():
            for waiter in queue.waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(self._closed_error())
            queue.waiters.clear()
        if self._last is not None:
            with suppress(LimitsUnavailable):
                await self.shared.sync(self._request(held=0))

    def _closed_error(self) -> NotAllowed:
        return NotAllowed(f"The limiter of {self._name} was closed.")

    def _passes_freely(self, now: float) -> bool:
        """Return whether no limit is known to be set; makes no call of Redis."""
        if self._last is None or now < self._pause_until or not self._limits.is_unlimited:
            return False
        is_fresh = now - self._synced_at < 3 * REFRESH_S
        # An outage cannot have set a limit where there was none.
        return is_fresh or self._sync_loop.is_outage

    def _lease(self, tokens: int, now: float) -> Lease:
        self.in_flight += 1
        return Lease(tokens, now, self._end_call)

    def _end_call(self, lease: Lease, actual_tokens: int, status: CallStatus) -> None:
        now, usage = asyncio.get_running_loop().time(), self._usage
        self.in_flight -= 1
        usage.tokens_owed += actual_tokens - lease.tokens
        if status == "ok":
            usage.ok += 1
            usage.latency_sum_s += now - lease.granted_at
            self._detector.note_answered()
        elif status in ("rate_limited", "timeout"):
            usage.congested += 1
        self._schedule_report(now)

    def _schedule_report(self, now: float) -> None:
        """Sync soon if other callers wait for the freed units, else with the next sync."""
        last = self._last
        if self._is_closed or last is None or self._limits.is_unlimited:
            return
        if last.is_contended:
            if last.reason is WaitReason.CONCURRENCY:
                self._ask_now()
            self._flush_at = min(self._flush_at, now + FLUSH_URGENT_S)
        elif last.waiting or 2 * last.in_flight >= last.cap > 0:
            self._flush_at = min(self._flush_at, now + FLUSH_S)
        else:
            return
        self._sync_loop.wake()

    def _enqueue(self, run: str, weight: float, waiter: Waiter) -> None:
        queue = self._queues.get(run)
        if queue is None:
            queue = self._queues[run] = WaitQueue(run, weight)
            self._ask_now()  # A run that did not wait yet may get a slot at once.
        queue.weight = weight
        self._gather(queue)
        queue.waiters.append(waiter)
        self._sync_loop.wake()

    def _ask_now(self) -> None:
        self._ask_at = self._gather_at = -math.inf

    def _gather(self, queue: WaitQueue) -> None:
        """Let callers gather while slots of their queue are still to come."""
        now = self._used_at
        left_s = queue.slots[-1].at - now if queue.slots else 0.0
        gather_at = now + min(self._limits.pace.horizon_s / 4, left_s / 2)
        self._gather_at = min(self._gather_at, gather_at)

    def _withdraw(self, run: str, waiter: Waiter) -> None:
        """Remove a caller that gave up; its slot goes to the next caller or back to Redis."""
        now = asyncio.get_running_loop().time()
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            # The caller got its slot in the same tick in which it gave up.
            self.in_flight -= 1
            queue = self._queues.setdefault(run, WaitQueue(run, 1.0))
            queue.reserve(Slot(now, -math.inf, waiter.tokens, now + self._limits.pace.late_s))
            self._hand_out()
        elif run in self._queues and waiter in self._queues[run].waiters:
            self._queues[run].waiters.remove(waiter)
        if not self._is_closed:
            self._flush_at = min(self._flush_at, now + FLUSH_URGENT_S)
            self._sync_loop.wake()

    def _due(self) -> float:
        is_active = self._queues or self.in_flight
        now = asyncio.get_running_loop().time()
        due = self._flush_at
        if is_active or now - self._used_at < IDLE_S:
            due = min(due, self._synced_at + min(REFRESH_S, self._lease_s / 4))
        if any(queue.unreserved for queue in self._queues.values()):
            due = min(due, max(self._ask_at, self._gather_at))
        return max(due, self._synced_at + GAP_S)

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        if self._must_restore:
            await self._limits.restore(self.shared)
            self._must_restore = False
        self._flush_at = self._gather_at = math.inf
        backoff_s, self._backoff_s = self._backoff_s, None
        request = self._request(backoff_s=backoff_s)
        sent_at = loop.time()
        try:
            reply = await self.shared.sync(request)
        except LimitsUnavailable:
            # Re-send a charge that was not confirmed. Drop an unconfirmed refund: applied twice it
            # would exceed the limit.
            self._usage.tokens_owed += max(0, request.usage.tokens_owed)
            self._ask_now()
            self._backoff_s = backoff_s if self._backoff_s is None else self._backoff_s
            raise
        now = self._synced_at = loop.time()
        self._offset.note(sent_at=sent_at, received_at=now, server_at=reply.now)
        self._apply(request, reply, now)

    def _request(self, *, held: int | None = None, backoff_s: float | None = None) -> SyncRequest:
        returned, self._returned = self._returned, []
        usage, self._usage = self._usage, Usage()
        for queue in list(self._queues.values()):
            returned += [ReturnedSlot(s.server_at, s.tokens) for s in queue.take_surplus()]
            if not queue.waiters:
                del self._queues[queue.run]
        demands = [
            Demand(queue.run, queue.weight, queue.unreserved, queue.estimates(MAX_ESTIMATES))
            for queue in self._queues.values()
        ]
        gone = [Demand(r, w, 0, ()) for r, w in self._reported.items() if r not in self._queues]
        reserved = sum(len(queue.slots) for queue in self._queues.values())
        return SyncRequest(
            process=self._process,
            lease_s=self._lease_s,
            version=self._limits.version,
            endpoint_version=self._limits.endpoint_version,
            held=self.in_flight + reserved if held is None else held,
            demands=tuple(demands + gone),
            returned=tuple(slot for slot in returned if slot.at > 0),
            usage=usage,
            backoff_s=backoff_s,
        )

    def _apply(self, request: SyncRequest, reply: SyncReply, now: float) -> None:
        self._reported = {demand.run: demand.weight for demand in request.demands if demand.waiting}
        if self._limits.are_lost(reply):
            # Redis lost its memory, so these grants respect no limit: drop them.
            self._must_restore = True
            self._flush_at = now
            return
        self._last = reply
        if self._limits.adopt(reply):
            for queue in self._queues.values():
                queue.slots.clear()  # Reserved under limits that no longer hold.
            self._gather_at = -math.inf
        if self._backoff_s is None:
            self._pause_until = -math.inf if reply.pause_s == 0 else self._pause_until
            if reply.pause_s > 0:
                self._hold_until(self._offset.local(reply.now + reply.pause_s))
        for grant in reply.grants:
            self._reserve(request.demands[grant.demand], reply, grant)
        self._ask_at = now + reply.retry_in_s if reply.reason else -math.inf
        if reply.reason or any(d.waiting > len(d.estimates) for d in request.demands):
            self._gather_at = -math.inf
        if any(len(queue.slots) > len(queue.waiters) for queue in self._queues.values()):
            self._flush_at = now  # Callers gave up during the sync.
        self._hand_out()

    def _hold_until(self, until: float) -> None:
        self._pause_until = until
        dropped = sum(queue.drop_before(until - PAUSE_EDGE_S) for queue in self._queues.values())
        if dropped:
            self._ask_now()

    def _reserve(self, demand: Demand, reply: SyncReply, grant: Grant) -> None:
        server_at = reply.now + grant.delay_s
        at, expires_at = self._offset.local(server_at), math.inf
        if self._limits.pace.is_rated:
            expires_at = at + self._limits.pace.late_s + self._offset.lag_s
        elif reply.pause_s > 0:
            at += random.uniform(0, RESUME_SPREAD_S)
        queue = self._queues.setdefault(demand.run, WaitQueue(demand.run, demand.weight))
        queue.reserve(Slot(at, server_at, grant.tokens, expires_at))

    def _hand_out(self) -> None:
        """Give the slots that are due to the first callers."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for queue in self._queues.values():
            self._hand_out_queue(queue, now)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if next_at := [queue.slots[0].at for queue in self._queues.values() if queue.slots]:
            self._timer = loop.call_at(min(next_at), self._hand_out)

    def _hand_out_queue(self, queue: WaitQueue, now: float) -> None:
        due = 0
        while queue.slots and queue.slots[0].at <= now + EARLY_S:
            slot = queue.slots.pop(0)
            due += 1
            if due == 1 and self._limits.pace.is_rated:
                self._offset.note_lateness(max(0.0, now - slot.at))
            if slot.expires_at < now:
                # Too late: calls that bunch up after a stall would exceed the limit.
                self._ask_now()
                self._sync_loop.wake()
            elif waiter := queue.next_waiter():
                self._usage.tokens_owed += waiter.tokens - slot.tokens
                waiter.future.set_result(self._lease(waiter.tokens, now))
            else:
                self._returned.append(ReturnedSlot(slot.server_at, slot.tokens))
