"""`BatchRunner`: evaluates an agent over many payloads, and can continue an earlier run.

Results are keyed by experiment, input and session, which follow from the payloads: a second run of
the same experiment reads the good results that are there. With a queue, messages announce results.
Must not: delete messages of other experiments.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pipeline.contract.result_keys import (
    SESSION_CHARS,
    announced_results,
    rollout_key,
    training_key,
)
from workers.agentcore.batch import AsyncBatchResult, BatchItem, BatchResult, BatchWaits, item_of
from workers.agentcore.batch_report import BatchReport, report_of, reward_of
from workers.agentcore.client import RolloutClient
from workers.agentcore.rollout_future import RolloutFuture

#: Seconds to the first poll of a result, with announcements and without; longest time between two.
_ANNOUNCED_S, _POLLED_S, _MOST_S = 5.0, 0.5, 15.0
_TRIES = 8

log = logging.getLogger(__name__)


class BatchRunner:
    """Runs sessions of an agent, within its quotas.

    Args:
        target: Runtime ARN, or URL of a container that serves the agent.
        s3_bucket: Bucket of the results.
        sqs_url: Queue that announces results; None: the bucket is polled.
        exp_id: Experiment; a known one is continued. None: a new one.
        tps_limit: Invocations and stops per second.
        max_concurrent_sessions: Sessions at once.
        timeout_s: Longest wait for a result.
        payload_style: Which of `_training` (needs the queue) and `_rollout` payloads carry.
        base_url: Endpoint of the policy.
        model_id: Name of the policy.

    Raises:
        ValueError: There is no bucket, or `training` without a queue.
    """

    def __init__(
        self,
        target: str,
        *,
        s3_bucket: str | None = None,
        sqs_url: str | None = None,
        exp_id: str | None = None,
        tps_limit: float = 25,
        max_concurrent_sessions: int = 1000,
        timeout_s: float = 900.0,
        payload_style: Literal["training", "rollout", "both"] = "both",
        base_url: str | None = None,
        model_id: str | None = None,
    ) -> None:
        if not s3_bucket:
            raise ValueError("BatchRunner needs s3_bucket: the agent saves its results there.")
        if payload_style not in ("training", "rollout", "both"):
            raise ValueError(f"payload_style is training, rollout or both, not {payload_style!r}.")
        if payload_style == "training" and not sqs_url:
            raise ValueError("The payload style `training` needs sqs_url.")
        self.exp_id = exp_id or f"batch-{uuid.uuid4().hex[:12]}"
        self._sqs_url = sqs_url
        self._styles = (payload_style != "rollout" and bool(sqs_url), payload_style != "training")
        self._most = max_concurrent_sessions
        self._timeout_s = timeout_s
        self._model = {
            name: value for name, value in (("base_url", base_url), ("model_id", model_id)) if value
        }
        self._client = RolloutClient(
            target,
            s3_bucket,
            self.exp_id,
            max_retry_attempts=_TRIES,
            tps_limit=tps_limit,
            max_pool_connections=64,
        )
        self._items = self._failed = 0
        self._rewards: dict[str, list[float]] = defaultdict(list)

    @property
    def s3_client(self) -> Any:
        """The boto3 client that reads results."""
        return self._client.s3_client

    def run(
        self,
        payloads: Sequence[Mapping[str, Any]],
        *,
        input_ids: Sequence[str] | None = None,
        session_ids: Sequence[str] | None = None,
    ) -> Iterator[BatchItem]:
        """Yield one item per payload, in the order of completion.

        Args:
            payloads: For the agent.
            input_ids: Payloads with the same one are tries of one problem; None: each its own.
            session_ids: One per payload; None: they follow from experiment, input and payload.
        """
        ids = self._ids(payloads, input_ids, session_ids)
        starts, waits = self._starts(payloads, ids), self._waits()
        with self._announcements() as announced, _progress(len(starts)) as advance:
            for item in BatchResult(starts, self._most, waits, announced=announced):
                self._count(item, ids)
                advance()
                yield item

    async def run_async(
        self,
        payloads: Sequence[Mapping[str, Any]],
        *,
        input_ids: Sequence[str] | None = None,
        session_ids: Sequence[str] | None = None,
    ) -> AsyncIterator[BatchItem]:
        """Yield the items asynchronously; arguments as for `run`."""
        ids = self._ids(payloads, input_ids, session_ids)
        starts, waits = self._starts(payloads, ids), self._waits()
        with self._announcements() as announced, _progress(len(starts)) as advance:
            async for item in AsyncBatchResult(starts, self._most, waits, announced=announced):
                self._count(item, ids)
                advance()
                yield item

    def report(self) -> BatchReport:
        """Return the figures of all items so far."""
        return report_of(self._rewards, items=self._items, failed=self._failed)

    def _waits(self) -> BatchWaits:
        first_s = _ANNOUNCED_S if self._styles[0] else _POLLED_S
        return BatchWaits(self._timeout_s, initial_interval=first_s, max_interval=_MOST_S)

    def _ids(
        self,
        payloads: Sequence[Mapping[str, Any]],
        input_ids: Sequence[str] | None,
        session_ids: Sequence[str] | None,
    ) -> list[tuple[str, str]]:
        """Return the input and the session of each payload."""
        inputs = list(input_ids or (f"{index:06d}" for index in range(len(payloads))))
        sessions = list(
            session_ids
            or (
                _session_id(self.exp_id, index, input_id, payload)
                for index, (input_id, payload) in enumerate(zip(inputs, payloads, strict=True))
            )
        )
        if not len(inputs) == len(sessions) == len(payloads):
            raise ValueError(
                f"{len(payloads)} payloads, {len(inputs)} input_ids, {len(sessions)} session_ids"
            )
        for session_id in sessions:
            if not SESSION_CHARS[0] <= len(session_id) <= SESSION_CHARS[1]:
                raise ValueError(f"A session id has 33 to 256 characters, unlike {session_id!r}.")
        return list(zip(inputs, sessions, strict=True))

    def _starts(
        self, payloads: Sequence[Mapping[str, Any]], ids: Sequence[tuple[str, str]]
    ) -> list[Any]:
        known, bucket = self._saved_keys(), self._client.s3_bucket

        def start(index: int) -> RolloutFuture | BatchItem:
            input_id, session_id = ids[index]
            payload, key = self._complete(payloads[index], input_id, session_id)
            if key in known:
                # A result of an earlier run; an error is run again.
                future = RolloutFuture(
                    self.s3_client, bucket, key, session_id=session_id, input_id=input_id
                )
                if future.done() and (item := item_of(index, future.result(), 0.0)).success:
                    return item
                self.s3_client.delete_object(Bucket=bucket, Key=key)
            return self._client.begin(payload, session_id, input_id, result_key=key)

        return [lambda index=index: start(index) for index in range(len(payloads))]

    def _complete(
        self, payload: Mapping[str, Any], input_id: str, session_id: str
    ) -> tuple[dict[str, Any], str]:
        """Return the payload to send, and the key of its result."""
        shared = {
            "exp_id": self.exp_id,
            "input_id": input_id,
            "s3_bucket": self._client.s3_bucket,
        }
        full = {k: v for k, v in payload.items() if k not in ("_training", "_rollout")}
        with_training, with_rollout = self._styles
        if with_training:
            full["_training"] = {**shared, "session_id": session_id, "sqs_url": self._sqs_url}
        if with_rollout:
            full["_rollout"] = {**self._model, **shared}
            return full, rollout_key(self.exp_id, input_id, session_id)
        if self._model:
            full["_rollout"] = self._model
        return full, training_key(self.exp_id, input_id, session_id)

    def _saved_keys(self) -> set[str]:
        pages = self.s3_client.get_paginator("list_objects_v2").paginate(
            Bucket=self._client.s3_bucket, Prefix=f"{self.exp_id}/"
        )
        return {item["Key"] for page in pages for item in page.get("Contents", ())}

    def _count(self, item: BatchItem, ids: Sequence[tuple[str, str]]) -> None:
        self._items += 1
        self._failed += not item.success
        reward = reward_of(item.result) if item.success and item.result else None
        if reward is not None:
            self._rewards[ids[item.index][0]].append(reward)

    @contextmanager
    def _announcements(self) -> Iterator[set[str]]:
        """Collect the keys that messages announce, in a thread."""
        announced: set[str] = set()
        if not self._styles[0]:
            yield announced
            return
        import boto3

        sqs: Any = boto3.client("sqs", region_name=self._client.calls.region)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._receive, args=(sqs, announced, stop), name="announcements", daemon=True
        )
        thread.start()
        try:
            yield announced
        finally:
            stop.set()
            thread.join()

    def _receive(self, sqs: Any, announced: set[str], stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                reply = sqs.receive_message(
                    QueueUrl=self._sqs_url, MaxNumberOfMessages=10, WaitTimeSeconds=1
                )
                for message in reply.get("Messages", ()):
                    keys = _own_keys(message["Body"], self.exp_id)
                    announced |= keys
                    if keys:
                        sqs.delete_message(
                            QueueUrl=self._sqs_url, ReceiptHandle=message["ReceiptHandle"]
                        )
            # Broad on purpose: without messages the bucket is polled, only later.
            except Exception as error:
                log.warning("The queue cannot be read: %s", error)
                stop.wait(2.0)


def _own_keys(body: str, exp_id: str) -> set[str]:
    try:
        keys = {result.key for result in announced_results(body)}
    except ValueError:
        return set()
    return {key for key in keys if key.startswith(f"{exp_id}/")}


def _session_id(exp_id: str, index: int, input_id: str, payload: Mapping[str, Any]) -> str:
    text = json.dumps([exp_id, index, input_id, payload], sort_keys=True, default=str)
    return f"s{index:06d}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show a bar on a terminal."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield lambda: None
        return
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("sessions", total=total)
        yield lambda: bar.advance(task)
