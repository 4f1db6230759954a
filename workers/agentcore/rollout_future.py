"""`RolloutFuture`: the result of one session of an agent, read from S3 by polls.

Made by `RolloutClient` and `BatchRunner`; a batch polls many of them. Must not: invoke a session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Generator
from concurrent.futures import CancelledError
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from workers.agentcore.runtime_calls import RuntimeCalls

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
        initial_interval: Seconds between the first two polls.
        max_interval: Longest time between two polls, in seconds.
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
        """Poll once whether the result is there; True too once the future was cancelled."""
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
        """Poll once, off the event loop."""
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
        """Return the seconds until the next poll is due."""
        if self._result is not None:
            return float("inf")
        return max(0.0, self._polled_at + self._interval_s - time.monotonic())

    def ready_to_poll(self) -> bool:
        """Return whether the next poll is due."""
        return self.time_until_next_poll() <= 0

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result_async().__await__()

    def _is_there(self) -> bool:
        """Poll once; a failing poll counts as no result yet, because the next one may succeed."""
        try:
            return self.done()
        except (ClientError, BotoCoreError, OSError) as error:
            log.warning("The result of %s cannot be polled: %s", self.session_id, error)
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


def _parse(body: bytes) -> dict[str, Any]:
    try:
        result = json.loads(body)
        if isinstance(result, dict):
            return result
        reason = f"it is a {type(result).__name__}"
    except ValueError as error:
        reason = str(error)
    return {"status_code": 500, "stop_reason": f"The result is no JSON object: {reason}."}
