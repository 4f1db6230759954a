"""The worker process: Celery takes requests, one event loop executes them.

Started by `rollout worker`. SIGTERM drains: the worker takes no new requests and running attempts
may finish within `drain_s`. The rest is handed back and uses no attempt. Must not: hold database
credentials.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, cast

from celery import Celery, signals
from celery.worker import state as celery_state

from pipeline.contract.messages import Heartbeat
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.queue.completions import OutcomePublisher
from pipeline.queue.payloads import open_payloads
from pipeline.redaction import Redactor, redact_logs
from pipeline.service import process_id
from pipeline.settings import Settings
from workers.process.celery_hooks import (
    BatchedTaskEvents,
    LastAcknowledgements,
    ReserveFreePlaces,
    start_no_more,
)
from workers.process.endpoints import announced_endpoints
from workers.process.heartbeats import Heartbeats, RejectedMessages
from workers.process.loop import LoopThread
from workers.process.loop_pool import pool_on
from workers.process.outbox import Outbox
from workers.process.plugins import load_plugins
from workers.process.runtime import Runtime, open_limits
from workers.process.tasks import register_tasks, reserved_beats
from workers.sandbox.kinds import set_default_kind

log = logging.getLogger(__name__)

#: Time to send the last completions, after the last attempt has ended.
_FLUSH_S = 20.0
_CLOSE_S = 5.0


def run_worker(settings: Settings, *, ready: Callable[[str], None] = lambda _: None) -> int:
    """Run a worker until SIGTERM; return its exit code.

    Args:
        settings: Concurrency, queues, plug-ins, model endpoint, drain time.
        ready: Called with the worker's id when the worker takes requests.

    Raises:
        ConfigError: A plug-in cannot be loaded, or the broker's URL cannot be used.
    """
    _quiet_libraries(settings.log_level)
    redactor = Redactor.of(settings, os.environ)
    redact_logs(redactor)
    load_plugins(settings.worker.plugins)
    set_default_kind(settings.worker.sandbox)
    broker = broker_of(settings)
    worker_id = process_id("worker")
    loop = LoopThread()
    _warn_without_limits(settings)
    outbox = _open_outbox(broker, settings)
    runtime = Runtime(
        settings,
        worker_id,
        limits=open_limits(settings, worker_id),
        redactor=redactor,
        isolates=True,
        keep=outbox.put_frame,
    )
    rejected = RejectedMessages()
    template = Heartbeat(
        worker_id=worker_id,
        sequence=0,
        capacity=settings.worker.concurrency,
        queues=settings.worker.queues,
        base_urls=announced_endpoints(settings),
    )
    heartbeats = Heartbeats(
        OutcomePublisher(broker),
        loop,
        runtime.in_flight,
        template=template,
        waiting=lambda: (*reserved_beats(celery_state.reserved_requests), *outbox.beats()),
        activity=runtime.activity.snapshot,
        rejected=rejected,
        every_s=settings.lease.heartbeat_s,
        announce_s=settings.worker.announce_s,
    )
    app = make_celery_app(broker, queues=settings.worker.queues, lease_s=settings.lease.lease_s)
    steps = cast(Any, app.steps)["consumer"]
    steps.update((BatchedTaskEvents, LastAcknowledgements, ReserveFreePlaces))
    register_tasks(
        app,
        runtime=runtime,
        loop=loop,
        outbox=outbox,
        signer=broker.signer,
        rejected=rejected,
        sends_events=broker.has_remote_control,
    )
    outbox.start()
    heartbeats.start()
    _drain_on_stop(loop, runtime, heartbeats, drain_s=settings.worker.drain_s)
    _announce_readiness(worker_id, ready)
    try:
        return _consume(app, worker_id, settings, loop)
    finally:
        outbox.close(timeout_s=_FLUSH_S)
        heartbeats.close()
        _close_connections(loop, runtime)
        if runtime.isolation is not None:
            runtime.isolation.close()
        loop.stop()


def _consume(app: Celery, worker_id: str, settings: Settings, loop: LoopThread) -> int:
    worker: Any = app.Worker(
        hostname=worker_id,
        pool=pool_on(loop),
        concurrency=settings.worker.concurrency,
        loglevel=settings.log_level,
        task_events=True,
        without_mingle=True,
        without_gossip=True,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def _warn_without_limits(settings: Settings) -> None:
    if settings.limits_redis_url is None:
        log.warning(
            "Limits on model calls need Redis, and none is set (ROLLOUT_LIMITS__REDIS_URL): "
            "calls of this worker are unlimited and only pause after 429s."
        )


def _close_connections(loop: LoopThread, runtime: Runtime) -> None:
    """Close the loop's connections; a server that does not answer must not delay the exit."""

    async def close() -> None:
        async with asyncio.timeout(_CLOSE_S):
            await runtime.close()

    try:
        loop.submit(close()).result(_CLOSE_S + 1)
    except Exception as error:
        log.warning("Connections could not be closed in order: %r", error)


def _open_outbox(broker: Broker, settings: Settings) -> Outbox:
    by_reference = settings.payloads.mode == "object" or broker.kind == "sqs"
    return Outbox(
        OutcomePublisher(broker),
        open_payloads(settings),
        inline_max_bytes=-1 if by_reference else settings.payloads.inline_max_bytes,
        spool=settings.data_dir / "spool",
    )


def _drain_on_stop(
    loop: LoopThread, runtime: Runtime, heartbeats: Heartbeats, *, drain_s: float
) -> None:
    def hand_back() -> None:
        # A rollout that is handed back is queued again at once, and this worker may still get it.
        start_no_more()
        count = loop.call(runtime.in_flight.hand_back_all, timeout_s=5)
        if count:
            log.warning("%d attempts were not done within %g s: handed back.", count, drain_s)

    def on_stop(**_: Any) -> None:
        heartbeats.stopping = True
        timer = threading.Timer(drain_s, hand_back)
        timer.daemon = True
        timer.start()

    signals.worker_shutting_down.connect(on_stop, weak=False)


def _quiet_libraries(log_level: str) -> None:
    """Silence the lines that Celery and the HTTP client log for every single rollout."""
    if log_level == "DEBUG":
        return
    for name in ("celery.worker.strategy", "celery.app.trace", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _announce_readiness(worker_id: str, ready: Callable[[str], None]) -> None:
    def on_ready(**_: Any) -> None:
        log.info("worker %s takes requests.", worker_id)
        ready(worker_id)

    signals.worker_ready.connect(on_ready, weak=False)
