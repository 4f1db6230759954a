"""`RolloutClient`: invokes an agent's sessions and waits for the results in S3.

For scripts and notebooks; runs of the pipeline need no client. Argument names are those of the
public toolkit. Must not: keep anything that a second process would need.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from workers.agentcore.batch import AsyncBatchResult, BatchResult, BatchWaits, Start
from workers.agentcore.runtime_calls import CallRate, InvocationError, RuntimeCalls

_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})

log = logging.getLogger(__name__)


class RolloutFuture:
    """The result of one session, when it is in S3. May be awaited.

    Args:
        s3_client: Reads the result.
        s3_bucket: Of the result.
        result_key: Of the result.
        session_id: The session, which `cancel` stops.
        input_id: The input of the session.
        calls: Stops the session; None: it is left running.
        initial_interval: Seconds between the first two looks.
        max_interval: Longest time between two looks, in seconds.
        backoff_factor: Growth of that time.
    """

    def __init__(
        self,
        s3_client: Any,
        s3_bucket: str,
        result_key: str,
        *,
        session_id: str,
        input_id: str,
        calls: RuntimeCalls | None = None,
        initial_interval: float = 0.5,
        max_interval: float = 30.0,
        backoff_factor: float = 1.5,
    ) -> None:
        self.s3_client = s3_client
        self.s3_bucket = s3_bucket
        self.result_key = result_key
        self.session_id = session_id
        self.input_id = input_id
        self.cancelled = False  #: whether a stop was attempted before there was a result
        self._calls = calls
        self._interval_s = initial_interval
        self._max_interval_s = max_interval
        self._backoff_factor = backoff_factor
        self._started_at = time.monotonic()
        self._polled_at = float("-inf")
        self._result: dict[str, Any] | None = None
        self._is_stopped = False

    def done(self) -> bool:
        """Look once whether the result is there; True too once the future was cancelled."""
        if self._result is not None or self.cancelled:
            return True
        self._polled_at = time.monotonic()
        try:
            found = self.s3_client.get_object(Bucket=self.s3_bucket, Key=self.result_key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _MISSING:
                raise
            self._interval_s = min(self._interval_s * self._backoff_factor, self._max_interval_s)
            return False
        self._result = _parse(found["Body"].read())
        return True

    async def done_async(self) -> bool:
        """Look once, off the event loop."""
        return await asyncio.to_thread(self.done)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the result, then stop the session; an error of the app is a result too.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Raises:
            TimeoutError: The time is up; the session is stopped.
            CancelledError: The future was cancelled before.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_there():
            if time.monotonic() > deadline:
                self.cancel()
                raise TimeoutError(f"There was no result after {timeout:g} s.")
            time.sleep(self._pause_s(deadline))
        return self._take()

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait as `result` does, off the event loop."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not await asyncio.to_thread(self._is_there):
            if time.monotonic() > deadline:
                await self.cancel_async()
                raise TimeoutError(f"There was no result after {timeout:g} s.")
            await asyncio.sleep(self._pause_s(deadline))
        return await asyncio.to_thread(self._take)

    def cancel(self) -> bool:
        """Stop the session; return whether one was stopped."""
        self.cancelled = self.cancelled or self._result is None
        return self._stop()

    async def cancel_async(self) -> bool:
        """Stop the session, off the event loop."""
        return await asyncio.to_thread(self.cancel)

    def elapsed(self) -> float:
        """Return the seconds since the invocation."""
        return time.monotonic() - self._started_at

    def time_until_next_poll(self) -> float:
        """Return the seconds until the result should be looked for again."""
        if self._result is not None:
            return float("inf")
        return max(0.0, self._polled_at + self._interval_s - time.monotonic())

    def ready_to_poll(self) -> bool:
        """Return whether that time has come."""
        return self.time_until_next_poll() <= 0

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result_async().__await__()

    def _is_there(self) -> bool:
        """Look once; a failing look is no result yet, and the next one may work."""
        try:
            return self.done()
        except (ClientError, BotoCoreError, OSError) as error:
            log.warning("The result of %s cannot be looked for: %s", self.session_id, error)
            return False

    def _pause_s(self, deadline: float) -> float:
        return min(self._interval_s, max(0.0, deadline - time.monotonic()) + 0.001)

    def _take(self) -> dict[str, Any]:
        if self._result is None:
            raise CancelledError("The future was cancelled before its result was there.")
        self._stop()
        return self._result

    def _stop(self) -> bool:
        if self._is_stopped or self._calls is None:
            return False
        self._is_stopped = True
        return self._calls.stop(self.session_id)


class RolloutClient:
    """Invokes sessions of one agent and collects their results.

    Args:
        agent_runtime_arn: Runtime ARN, or URL of a container that serves the agent.
        s3_bucket: Bucket of the results.
        exp_id: Experiment, the first part of the results' keys.
        max_retry_attempts: Tries of one call.
        tps_limit: Invocations and stops per second.
        max_pool_connections: Calls at once.
        base_url: Endpoint of the policy, carried in `_rollout`.
        model_id: Name of the policy, carried in `_rollout`.
        **extra_config: Further fields of `_rollout`, such as `sampling_params`.
    """

    def __init__(
        self,
        agent_runtime_arn: str,
        s3_bucket: str,
        exp_id: str,
        max_retry_attempts: int = 5,
        tps_limit: float = 25,
        max_pool_connections: int = 10,
        base_url: str | None = None,
        model_id: str | None = None,
        **extra_config: Any,
    ) -> None:
        self.agent_runtime_arn = agent_runtime_arn
        self.s3_bucket = s3_bucket
        self.exp_id = exp_id
        self.extra_config = extra_config
        self.base_url, self.model_id = base_url, model_id
        self.calls = RuntimeCalls(
            agent_runtime_arn,
            CallRate(tps_limit),
            max_retry_attempts=max_retry_attempts,
            max_pool_connections=max_pool_connections,
        )
        self.s3_client: Any = boto3.client("s3", region_name=self.calls.region)

    def invoke(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Begin one session.

        Args:
            payload: For the agent.
            session_id: 33 to 256 characters; None: a new one.
            input_id: Input, the second part of the result's key; None: a new one.
            **rollout_overrides: Fields of `_rollout` for this invocation.

        Raises:
            InvocationError: The agent did not take it; the session is stopped.
        """
        session_id = session_id or str(uuid.uuid4())
        input_id = input_id or str(uuid.uuid4())
        named = {"base_url": self.base_url, "model_id": self.model_id}
        rollout = {
            **self.extra_config,
            **{name: value for name, value in named.items() if value},
            **rollout_overrides,
            "exp_id": self.exp_id,
            "input_id": input_id,
            "s3_bucket": self.s3_bucket,
        }
        return self.begin({**payload, "_rollout": rollout}, session_id, input_id)

    async def invoke_async(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Begin one session, off the event loop; arguments as for `invoke`."""
        return await asyncio.to_thread(
            self.invoke, payload, session_id, input_id, **rollout_overrides
        )

    def begin(
        self,
        payload: Mapping[str, Any],
        session_id: str,
        input_id: str,
        *,
        result_key: str | None = None,
    ) -> RolloutFuture:
        """Invoke a session with a complete payload; the app's answer names the result.

        Args:
            payload: With `_rollout`, `_training` or both.
            session_id: The session.
            input_id: Its input.
            result_key: Where the app names none: `_training` alone.
        """
        try:
            answer = self.calls.invoke(session_id, payload)
        except InvocationError:
            self.calls.stop(session_id)
            raise
        key = answer.get("result_key") or result_key
        if key is None:
            self.calls.stop(session_id)
            raise InvocationError("The app names no result_key: it saves no result.")
        return RolloutFuture(
            self.s3_client,
            answer.get("s3_bucket") or self.s3_bucket,
            key,
            session_id=session_id,
            input_id=input_id,
            calls=self.calls,
        )

    def run_batch(
        self,
        payloads: Sequence[Mapping[str, Any]],
        max_concurrent_sessions: int,
        *times: float,
        **named_times: float,
    ) -> BatchResult:
        """Return an iterator over one `BatchItem` per payload, in the order of completion.

        Args:
            payloads: For the agent.
            max_concurrent_sessions: Sessions at once.
            *times: The fields of `BatchWaits` in their order, `timeout` first.
            **named_times: The same by their names.
        """
        waits = BatchWaits(*times, **named_times)
        return BatchResult(self._starts(payloads), max_concurrent_sessions, waits)

    def run_batch_async(
        self,
        payloads: Sequence[Mapping[str, Any]],
        max_concurrent_sessions: int,
        *times: float,
        **named_times: float,
    ) -> AsyncBatchResult:
        """Return the same as an asynchronous iterator."""
        waits = BatchWaits(*times, **named_times)
        return AsyncBatchResult(self._starts(payloads), max_concurrent_sessions, waits)

    def _starts(self, payloads: Sequence[Mapping[str, Any]]) -> list[Start]:
        return [partial(self.invoke, payload) for payload in payloads]


def _parse(body: bytes) -> dict[str, Any]:
    try:
        result = json.loads(body)
        if isinstance(result, dict):
            return result
        reason = f"it is a {type(result).__name__}"
    except ValueError as error:
        reason = str(error)
    return {"status_code": 500, "stop_reason": f"The result is no JSON object: {reason}."}
