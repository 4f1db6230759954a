"""`AgentCoreRLApp`: an agent's HTTP service that answers at once and saves its rollout at its end.

Runs in the agent's container, so it imports boto3 and bedrock_agentcore only. Every invocation that
names a destination ends in one object in S3, good or an error. Must not: import Celery, a database
driver or the rest of the pipeline.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import wraps
from typing import Any

from starlette.exceptions import HTTPException

from workers.agentcore.destination import BadTrainingDestination, Destination, destination_of
from workers.agentcore.extras import optional
from workers.agentcore.invocation import enter_rollout
from workers.agentcore.logging import configure_logging
from workers.agentcore.publication import save, send
from workers.agentcore.result import ResultShapeError, error_bytes, success_bytes

BedrockAgentCoreApp: Any = optional("agentcore", "bedrock_agentcore.runtime", "BedrockAgentCoreApp")

#: Sync entrypoints that run at once. On AgentCore each session has a process of its own.
_MOST_THREADS = 256
#: Uploads at once.
_MOST_UPLOADS = 16
#: Time in which rollouts that a stop interrupts may save their error results.
_STOP_S = 10.0

_CANCELLED = "The app was stopped before the rollout was done."

log = logging.getLogger(__name__)


class AgentCoreRLApp(BedrockAgentCoreApp):
    """A `BedrockAgentCoreApp` whose entrypoint returns a rollout instead of an answer.

    `s3_client` and `sqs_client` are boto3 clients, made at first use, and may be replaced.

    Args:
        debug: As for `BedrockAgentCoreApp`.
        lifespan: As for `BedrockAgentCoreApp`.
        middleware: As for `BedrockAgentCoreApp`.
    """

    def __init__(
        self, debug: bool = False, lifespan: Any = None, middleware: Sequence[Any] | None = None
    ) -> None:
        super().__init__(debug=debug, lifespan=self._lifespan(lifespan), middleware=middleware)
        configure_logging()
        self._clients: dict[str, Any] = {}
        #: Rollouts under way. The loop itself keeps weak references only.
        self._rollouts: dict[tuple[str, ...] | asyncio.Task[None], asyncio.Task[None]] = {}
        self._sync_threads = ThreadPoolExecutor(_MOST_THREADS, "rollout")
        self._upload_threads = ThreadPoolExecutor(_MOST_UPLOADS, "upload")

    @property
    def s3_client(self) -> Any:
        """The boto3 client that saves results."""
        return self._client("s3")

    @s3_client.setter
    def s3_client(self, client: Any) -> None:
        self._clients["s3"] = client

    @property
    def sqs_client(self) -> Any:
        """The boto3 client that announces results."""
        return self._client("sqs")

    @sqs_client.setter
    def sqs_client(self, client: Any) -> None:
        self._clients["sqs"] = client

    def rollout_entrypoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that runs one rollout, sync or async: `(payload[, context])`.

        It returns a dict; with `_training` in the payload that has `rollout_data`, a non-empty list
        with one item per turn, and `rewards`, a finite number or a list of one or one per turn. The
        invocation is answered at once; the dict, or the error that the function raised, is saved.
        """
        takes_context = self._takes_context(function)

        @wraps(function)
        async def start(payload: Any, context: Any) -> dict[str, str]:
            try:
                destination = destination_of(payload, getattr(context, "session_id", None))
            except BadTrainingDestination as error:
                # Errors in `_rollout` become the SDK's 500: clients of the public toolkit know it.
                raise HTTPException(400, str(error)) from error
            arguments = (payload, context) if takes_context else (payload,)
            self._begin(function, arguments, destination)
            return _answer(destination)

        # The SDK inspects the signature to decide whether to pass the context.
        del start.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
        return self.entrypoint(start)

    def _begin(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        destination: Destination | None,
    ) -> None:
        """Run the rollout in the background, unless it already runs."""
        if destination is not None and destination.identity in self._rollouts:
            return
        busy = self.add_async_task(getattr(function, "__name__", "rollout"))
        task = asyncio.get_running_loop().create_task(self._run(function, arguments, destination))
        key = destination.identity if destination is not None else task
        self._rollouts[key] = task

        def end(_: asyncio.Task[None]) -> None:
            self._rollouts.pop(key, None)
            self.complete_async_task(busy)

        task.add_done_callback(end)

    async def _run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        destination: Destination | None,
    ) -> None:
        payload = arguments[0] if isinstance(arguments[0], Mapping) else {}
        sections = (payload.get("_training"), payload.get("_rollout"))
        enter_rollout({k: v for s in sections if isinstance(s, Mapping) for k, v in s.items()})
        returned: Any = None
        try:
            returned = await self._call(function, arguments)
            if destination is None:
                return
            body = await _in_thread(
                self._upload_threads, lambda: success_bytes(returned, destination, payload)
            )
            is_good = True
        # Broad on purpose, BaseException too: an entrypoint is foreign code, and its client
        # waits for a result.
        except BaseException as error:
            log.exception("The rollout failed.")
            if destination is None:
                return
            if isinstance(error, asyncio.CancelledError) and not str(error):
                error = asyncio.CancelledError(_CANCELLED).with_traceback(error.__traceback__)
            body = error_bytes(error, destination, payload, partial=returned)
            is_good = False
        await self._publish(destination, body, is_good=is_good)

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        ):
            return await function(*arguments)
        context = contextvars.copy_context()

        def call() -> tuple[Any, BaseException | None]:
            try:
                return context.run(function, *arguments), None
            # A future takes no StopIteration, and SystemExit would end the loop that awaits it.
            except BaseException as error:
                return None, error

        returned, error = await _in_thread(self._sync_threads, call)
        if isinstance(error, StopIteration):
            raise RuntimeError("the entrypoint raised StopIteration") from error
        if error is not None:
            raise error
        if inspect.isawaitable(returned):
            return await returned
        if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            raise ResultShapeError("the entrypoint must return a dict, and it is a generator")
        return returned

    async def _publish(self, destination: Destination, body: bytes, *, is_good: bool) -> None:
        """Save and announce a result; a failure is logged, and the sweep finds unannounced ones."""
        result, sqs_url = destination.result, destination.sqs_url

        def publish() -> None:
            save(self.s3_client, result, body, is_good=is_good)
            log.info("The result is saved at s3://%s/%s.", result.bucket, result.key)
            if sqs_url is not None:
                send(self.sqs_client, sqs_url, result)

        try:
            await asyncio.shield(_in_thread(self._upload_threads, publish))
        # Broad on purpose: no caller awaits this task, so the error can only be logged.
        except Exception:
            log.exception("The result of %s was not published.", result.key)

    def _client(self, service: str) -> Any:
        client = self._clients.get(service)
        if client is None:
            import boto3

            # boto3 itself reads AWS_DEFAULT_REGION and the profile, not AWS_REGION.
            region = os.environ.get("AWS_REGION") or None
            client = self._clients.setdefault(service, boto3.client(service, region_name=region))
        return client

    def _lifespan(self, inner: Any) -> Any:
        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            async with inner(app) if inner is not None else nullcontext() as state:
                yield state
            await asyncio.to_thread(self._stop_rollouts)

        return lifespan

    def _stop_rollouts(self) -> None:
        """Cancel the rollouts under way, and wait until their error results are saved."""
        loop, tasks = self._worker_loop, list(self._rollouts.values())
        if loop is None or not tasks:
            return

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_STOP_S)

        asyncio.run_coroutine_threadsafe(cancel(), loop).result(_STOP_S + 1)


def _answer(destination: Destination | None) -> dict[str, str]:
    answer = {"status": "processing"}
    if destination is not None and not destination.needs_turns:
        bucket, key = destination.result
        answer |= {"s3_bucket": bucket, "result_key": key}
    return answer


async def _in_thread(threads: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(threads, call)
