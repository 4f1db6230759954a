"""Repeats one model call while repeating can help: 429, 5xx, timeouts, lost connections.

Every model client runs its calls through `CallRetries`. Waits happen inside the call, so they use
no attempt. Must not: know HTTP or a provider, or retry an error that a retry cannot help.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable

from pipeline.contract.errors import ModelError, ModelRateLimit, ModelTransportError
from workers.core.model_response import ModelResponse
from workers.llm.call_limits import CallLease, CallLimiter, CallStatus


@dataclass(frozen=True, slots=True)
class CallRetryPolicy:
    """The bounds of one call's retries; the first bound that is met ends them."""

    max_retries: int = 10  #: tries after the first one
    budget_s: float = 300.0  #: seconds from the first try to the start of the last
    base_s: float = 0.5  #: backoff before the first retry, doubled each time, full jitter
    max_s: float = 30.0  #: cap of the backoff

    def delay_s(self, retry: int, retry_after_s: float | None, jitter: float) -> float:
        """Seconds to wait before retry number `retry` (from 1); `jitter` is uniform in [0, 1).

        The server's `Retry-After` is the minimum. Jitter is added to it, because otherwise all
        callers would retry at once.
        """
        backoff = min(self.max_s, self.base_s * 2 ** min(retry - 1, 30))
        if retry_after_s is None:
            return backoff * jitter
        return retry_after_s + min(backoff, 0.1 * retry_after_s + 0.05) * jitter


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answer of a call, with its retries, waits and latency."""

    response: ModelResponse
    retries: int
    waited_s: float  #: seconds slept between tries
    rate_limit_wait_s: float  #: the part of `waited_s` after a 429, plus the wait for the limiter
    latency_ms: float  #: of the try that succeeded


class BrokenStream(ModelTransportError):
    """An answer that broke off after its first pieces were passed on, so no retry is possible."""


def broken_stream(error: ModelError) -> BrokenStream:
    """Return the error of a stream that ended with this error."""
    return BrokenStream(str(error), code=error.code)


class CallRetries:
    """Runs calls under one policy.

    Args:
        policy: The bounds.
        sleep: Waits; tests pass a substitute.
        jitter: Uniform in [0, 1).
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        policy: CallRetryPolicy,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._sleep = sleep
        self._jitter = jitter
        self._clock = clock

    async def run(
        self,
        send: Callable[[], Awaitable[ModelResponse]],
        *,
        limiter: CallLimiter | None = None,
        estimated_tokens: int = 0,
    ) -> CallResult:
        """Send until an answer comes or a bound is met.

        Raises:
            ModelRateLimit: The last try got a 429, or `Retry-After` exceeds the budget.
            ModelTransportError: The last try failed, or a stream broke off.
        """
        started = self._clock()
        waited_s = rate_limit_wait_s = 0.0
        retries = 0
        while True:
            asked = self._clock()
            lease = await limiter.acquire(estimated_tokens) if limiter else None
            sent = self._clock()
            rate_limit_wait_s += sent - asked
            started += sent - asked  # the budget does not count waits for the limiter
            try:
                response = await _settled(send, lease, estimated_tokens)
            except BrokenStream:
                raise
            except (ModelRateLimit, ModelTransportError) as error:
                if limiter and isinstance(error, ModelRateLimit):
                    await _finish(limiter.note_rate_limited(error.retry_after_s))
                retries += 1
                delay_s = self.policy.delay_s(retries, error.retry_after_s, self._jitter())
                elapsed_s = self._clock() - started
                if retries > self.policy.max_retries or elapsed_s + delay_s > self.policy.budget_s:
                    raise _given_up(error, tries=retries, elapsed_s=elapsed_s) from error
                await self._sleep(delay_s)
                waited_s += delay_s
                if isinstance(error, ModelRateLimit):
                    rate_limit_wait_s += delay_s
                continue
            latency_ms = (self._clock() - sent) * 1000
            return CallResult(response, retries, waited_s, rate_limit_wait_s, latency_ms)


async def _settled(
    send: Callable[[], Awaitable[ModelResponse]], lease: CallLease | None, estimated_tokens: int
) -> ModelResponse:
    if lease is None:
        return await send()
    # The server may have computed a cancelled or timed-out call, so the estimate is charged.
    actual_tokens = estimated_tokens
    end: CallStatus = "error"
    try:
        response = await send()
        end = "ok"
        if response.prompt_tokens is not None and response.completion_tokens is not None:
            actual_tokens = response.prompt_tokens + response.completion_tokens
        return response
    except ModelRateLimit:
        actual_tokens, end = 0, "rate_limited"
        raise
    except ModelError as error:
        is_timeout = error.code == "timeout"
        is_charged = is_timeout or isinstance(error, BrokenStream)
        actual_tokens = estimated_tokens if is_charged else 0
        end = "timeout" if is_timeout else "error"
        raise
    finally:
        await _finish(lease.settle(actual_tokens, end))


async def _finish(pending: Awaitable[None] | None) -> None:
    if isawaitable(pending):
        await pending


def _given_up(
    error: ModelRateLimit | ModelTransportError, *, tries: int, elapsed_s: float
) -> ModelError:
    count = "1 try" if tries == 1 else f"{tries} tries"
    return type(error)(
        f"{error} (gave up after {count} in {elapsed_s:.1f} s)",
        code=error.code,
        retry_after_s=error.retry_after_s,
    )
