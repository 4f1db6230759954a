"""The calls that invoke and stop sessions, at a limited rate.

`client.py` and `batch_runner.py` use it, from any thread. An ARN is called through boto3, a URL by
a POST. Calls that may succeed later are tried again. Must not: read results.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from pipeline.contract.result_keys import SESSION_HEADER

#: Statuses after which the same call may succeed: quotas, and containers that are starting.
_RETRYABLE = frozenset({402, 409, 424, 429, 500, 502, 503, 504})
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0
_CONNECT_S, _ANSWER_S = 10.0, 120.0

log = logging.getLogger(__name__)


class InvocationError(RuntimeError):
    """An agent did not accept a rollout; the text quotes the service."""


class CallRate:
    """Spaces calls of one process evenly; shared by all callers of one account."""

    def __init__(self, tps_limit: float) -> None:
        self._interval_s = 1.0 / tps_limit
        self._next_at = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Sleep until the next call may be made."""
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next_at)
            self._next_at = at + self._interval_s
        time.sleep(at - now)


class RuntimeCalls:
    """The sessions of one agent.

    Args:
        target: Runtime ARN, or URL of a container.
        rate: Spaces the calls.
        max_retry_attempts: Tries of one call.
        max_pool_connections: Calls at once.
    """

    def __init__(
        self, target: str, rate: CallRate, *, max_retry_attempts: int, max_pool_connections: int
    ) -> None:
        self.target = target
        self._rate = rate
        self.region = region_of(target)
        self._tries = max(1, max_retry_attempts)
        self.client: Any = None
        if self.region is not None:
            import boto3

            config = Config(
                retries={"total_max_attempts": 1},
                max_pool_connections=max_pool_connections,
                connect_timeout=_CONNECT_S,
                read_timeout=_ANSWER_S,
            )
            self.client = boto3.client("bedrock-agentcore", region_name=self.region, config=config)
        else:
            import urllib3

            self._http = urllib3.PoolManager(maxsize=max_pool_connections, retries=False)

    def invoke(self, session_id: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a session; return the app's answer.

        Raises:
            InvocationError: The agent did not accept the rollout.
        """
        body = json.dumps(payload).encode()
        answer = self._retried(lambda: self._invoke(session_id, body))
        try:
            document = json.loads(answer)
        except ValueError:
            document = None
        if not isinstance(document, dict) or document.get("status") != "processing":
            raise InvocationError(
                f"The agent answered {answer[:200]!r}: it has no rollout_entrypoint."
            )
        return document

    def stop(self, session_id: str) -> bool:
        """Stop a session; return whether there was one. A container behind a URL has none."""
        if self.client is None:
            return False
        try:
            self._retried(lambda: self._stop(session_id))
        except InvocationError as error:
            log.warning("Session %s was not stopped: %s", session_id, error)
            return False
        return True

    def _invoke(self, session_id: str, body: bytes) -> bytes:
        if self.client is not None:
            reply = self.client.invoke_agent_runtime(
                agentRuntimeArn=self.target, runtimeSessionId=session_id, payload=body
            )
            return reply["response"].read()
        reply = self._http.request(
            "POST",
            self.target.rstrip("/") + "/invocations",
            body=body,
            headers={SESSION_HEADER: session_id, "Content-Type": "application/json"},
            timeout=_ANSWER_S,
        )
        if reply.status >= 400:
            raise _Refused(reply.status, reply.data[:500].decode("utf-8", "replace"))
        return reply.data

    def _stop(self, session_id: str) -> bytes:
        self.client.stop_runtime_session(agentRuntimeArn=self.target, runtimeSessionId=session_id)
        return b""

    def _retried(self, call: Callable[[], bytes]) -> bytes:
        from urllib3.exceptions import HTTPError

        for number in range(1, self._tries + 1):
            self._rate.wait()
            try:
                return call()
            except (ClientError, BotoCoreError, HTTPError, OSError, _Refused) as error:
                if number == self._tries or _status_of(error) not in _RETRYABLE:
                    raise InvocationError(str(error)) from error
                wait_s = min(_FIRST_WAIT_S * 2 ** (number - 1), _MOST_WAIT_S)
                log.info("A call is tried again in %.1f s: %s", wait_s, error)
                time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


def _status_of(error: Exception) -> int:
    if isinstance(error, ClientError):
        return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return error.status if isinstance(error, _Refused) else 503


def region_of(target: str) -> str | None:
    """Return the region of an ARN; None for a URL.

    Raises:
        ValueError: The target is neither.
    """
    if target.startswith(("http://", "https://")):
        return None
    parts = target.split(":")
    if parts[0] != "arn" or len(parts) < 6 or not parts[3]:
        raise ValueError(f"Neither an http(s) URL nor an ARN with a region: {target}")
    return parts[3]
