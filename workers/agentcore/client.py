"""`RolloutClient`: invokes an agent's sessions and waits for the results in S3.

For scripts and notebooks; runs of the pipeline need no client. Argument names are those of the
public toolkit. Must not: keep state that a second process would need.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import boto3

from workers.agentcore.batch import AsyncBatchResult, BatchResult, BatchWaits, Start
from workers.agentcore.rollout_future import RolloutFuture
from workers.agentcore.runtime_calls import CallRate, InvocationError, RuntimeCalls


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
            InvocationError: The agent did not accept the invocation; the session is stopped.
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
