"""The trainer's client for asyncio: the methods of `TrainerClient`, awaitable.

Used by asynchronous trainers. The client has two threads of its own: one runs the statements, one
listens while a pull waits. A task renews the leases while a step trains. Must not: run a statement
on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from pipeline.contract.errors import PipelineError
from pipeline.contract.train_batch import (
    BatchSpec,
    Later,
    NotReady,
    ResumeInfo,
    VersionOfStep,
    no_version,
)
from pipeline.settings import Settings
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch

log = logging.getLogger(__name__)

#: Part of a lease after which it is renewed.
_RENEWALS = 3
#: Longest wait of the listening thread, and so of `close`.
_LISTEN_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class _Prefetch(NamedTuple):
    """A pull that `prefetch` began."""

    spec: BatchSpec | None
    policy_version: int | None
    pulling: asyncio.Task[TrainBatch]

    @property
    def found(self) -> bool:
        """Whether the pull has its batch, or an error other than `NotReady`."""
        task = self.pulling
        return task.done() and not task.cancelled() and not isinstance(task.exception(), NotReady)


def _awaited(
    method: Callable[Concatenate[TrainerClient, P], T],
) -> Callable[Concatenate[AsyncTrainerClient, P], Coroutine[Any, Any, T]]:
    """Return a method of the other client as one that is awaited."""

    @wraps(method)
    async def call(self: AsyncTrainerClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._do(method, self._client, *args, **kwargs)

    return call


class AsyncTrainerClient:
    """Leases complete groups of one run to one consumer; see `TrainerClient`.

    `async with` it, or call `close`. A pull whose await is cancelled may have leased its batch: the
    same step gives it again.

    Args:
        client: The client whose methods are called; this object closes it.
    """

    def __init__(self, client: TrainerClient) -> None:
        self._client = client
        self._statements = ThreadPoolExecutor(1, thread_name_prefix="rollout-trainer")
        self._listening = ThreadPoolExecutor(1, thread_name_prefix="rollout-trainer-wait")
        self._prefetched: dict[int, _Prefetch] = {}
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, run: str, *, consumer: str = "trainer", settings: Settings | None = None
    ) -> Self:
        """Return a client as `TrainerClient.connect` does."""
        return cls(
            await asyncio.to_thread(
                TrainerClient.connect, run, consumer=consumer, settings=settings
            )
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def pull(
        self,
        step: int,
        spec: BatchSpec | None = None,
        *,
        policy_version: int | None = None,
        timeout_s: float | None = None,
    ) -> TrainBatch:
        """Return the batch of this step, prefetched, leased now, or as before.

        Args:
            step: See `TrainerClient.pull`.
            spec: None: that of the prefetch, if there is one.
            policy_version: None: that of the prefetch, if there is one.
            timeout_s: Longest wait. None: no wait, or that of the prefetch if there is one.
        """
        began = asyncio.get_running_loop().time()
        if (prefetch := self._prefetched.get(step)) is not None:
            spec = spec or prefetch.spec
            policy_version = prefetch.policy_version if policy_version is None else policy_version
            await asyncio.wait({prefetch.pulling}, timeout=timeout_s)
            if prefetch.found:
                del self._prefetched[step]
                return prefetch.pulling.result()
            await self._cancel_prefetches([step])
        waited_s = asyncio.get_running_loop().time() - began
        return await self._pull(step, spec, policy_version, max(0.0, (timeout_s or 0.0) - waited_s))

    async def _pull(
        self, step: int, spec: BatchSpec | None, policy_version: int | None, timeout_s: float
    ) -> TrainBatch:
        self._keep_leases()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            left_s = deadline - loop.time()
            batch = await self._do(
                self._client.try_pull,
                step,
                spec,
                policy_version=policy_version,
                is_last_try=left_s <= 0,
            )
            if batch is not None:
                return batch
            await loop.run_in_executor(
                self._listening, self._client.wait_for_groups, min(left_s, _LISTEN_S)
            )

    def prefetch(
        self,
        step: int,
        spec: BatchSpec | None = None,
        *,
        policy_version: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Begin to pull the batch of a step while another one trains; `pull(step)` returns it.

        Args:
            step: The step; a second call for it changes nothing.
            spec: The batch to lease.
            policy_version: The version with which this batch will be trained, such as the current
                one plus 1.
            timeout_s: Longest wait.
        """
        if step not in self._prefetched:
            pulling = self._pull(step, spec, policy_version, timeout_s)
            task = asyncio.create_task(pulling, name=f"prefetch of step {step}")
            task.add_done_callback(_retrieve)
            self._prefetched[step] = _Prefetch(spec, policy_version, task)

    async def abandon(self, step: int, *, reason: str) -> int:
        """Give back the groups of a step; a prefetch of it ends."""
        await self._cancel_prefetches([step])
        return await self._do(self._client.abandon, step, reason=reason)

    async def resume(self, *, committed_step: int | None, later: Later = "replay") -> ResumeInfo:
        """Return the next step after a restart from a checkpoint; prefetches end."""
        await self._cancel_prefetches(list(self._prefetched))
        return await self._do(self._client.resume, committed_step=committed_step, later=later)

    commit = _awaited(TrainerClient.commit)
    publish_policy = _awaited(TrainerClient.publish_policy)
    enqueue = _awaited(TrainerClient.enqueue)
    cancel = _awaited(TrainerClient.cancel)
    renew = _awaited(TrainerClient.renew)
    capacity = _awaited(TrainerClient.capacity)
    stats = _awaited(TrainerClient.stats)

    async def stream(
        self,
        spec: BatchSpec | None = None,
        *,
        start_step: int | None = None,
        policy_version: VersionOfStep = no_version,
        timeout_s: float = 600.0,
    ) -> AsyncIterator[TrainBatch]:
        """Yield batch after batch until the run has no more; the caller commits."""
        step = await self._do(self._client.next_step) if start_step is None else start_step
        while True:
            try:
                batch = await self.pull(
                    step, spec, policy_version=policy_version(step), timeout_s=timeout_s
                )
            except NotReady as error:
                if error.drained:
                    return
                raise
            yield batch
            step += 1

    async def close(self) -> None:
        """End prefetches and renewals, and close the connections."""
        await self._cancel_prefetches(list(self._prefetched))
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        loop = asyncio.get_running_loop()
        # The thread of a cancelled await still runs its statement, which must end first.
        await loop.run_in_executor(None, self._close_threads)

    def _close_threads(self) -> None:
        self._listening.shutdown(wait=True)
        self._statements.shutdown(wait=True)
        self._client.close()

    async def _do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._statements, call)

    async def _cancel_prefetches(self, steps: list[int]) -> None:
        tasks = [self._prefetched.pop(step).pulling for step in steps if step in self._prefetched]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _keep_leases(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew_leases(), name="renewal of leases")

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._client.lease_s / _RENEWALS)
            try:
                await self.renew()
            except PipelineError as error:
                log.warning("The leases of the trainer were not renewed: %s", error)


def _retrieve(task: asyncio.Task[TrainBatch]) -> None:
    """Retrieve the exception of a prefetch that is never pulled: asyncio would log it."""
    if not task.cancelled():
        task.exception()
