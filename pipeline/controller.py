"""The controller: its services in one process, each in its thread.

Used by `rollout controller`. Each service can also run alone (`--only`), and in several processes
at once. Must not: do the work of a service.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from sqlalchemy import Engine

from pipeline.agentcore.results import RemoteResults
from pipeline.agentcore.sessions import SessionStopper
from pipeline.collector import Collector
from pipeline.dispatcher import Dispatcher
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import OutcomeConsumer, OutcomePublisher
from pipeline.queue.markers import MarkerSender
from pipeline.queue.payloads import open_payloads
from pipeline.queue.requests import RequestPublisher
from pipeline.reconciler import Reconciler
from pipeline.redaction import Redactor, redact_logs
from pipeline.service import Service, run_service
from pipeline.settings import Settings

log = logging.getLogger(__name__)


def _dispatcher(engine: Engine, settings: Settings) -> Service:
    publisher = RequestPublisher(broker_of(settings), expires_s=settings.dispatch.request_expires_s)
    return Dispatcher(engine, publisher, settings)


def _collector(engine: Engine, settings: Settings) -> Service:
    broker = broker_of(settings)
    publisher = RequestPublisher(broker, expires_s=settings.dispatch.request_expires_s)
    return Collector(
        engine,
        OutcomeConsumer(broker),
        settings,
        markers=MarkerSender(OutcomePublisher(broker)),
        stop_attempts=publisher.stop_attempts,
    )


def _reconciler(engine: Engine, settings: Settings) -> Service:
    return Reconciler(engine, broker_of(settings), open_payloads(settings), settings)


def _results(engine: Engine, settings: Settings) -> Service:
    return RemoteResults(engine, open_payloads(settings), settings)


def _sessions(engine: Engine, settings: Settings) -> Service:
    return SessionStopper(engine, settings)


SERVICES: Mapping[str, Callable[[Engine, Settings], Service]] = MappingProxyType(
    {
        "collector": _collector,
        "dispatcher": _dispatcher,
        "reconciler": _reconciler,
        "results": _results,
        "sessions": _sessions,
    }
)


def run_controller(
    engine: Engine,
    settings: Settings,
    *,
    stop: threading.Event,
    only: Sequence[str] = tuple(SERVICES),
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Run services until `stop` is set; returns when all have ended their step.

    Args:
        engine: The store.
        settings: Broker, payload store, leases and limits.
        stop: Ends the services when set.
        only: Names of services, out of `SERVICES`.
        ready: Called when all are running.
    """
    redact_logs(Redactor.of(settings, os.environ))
    threads = [
        threading.Thread(
            target=run_service, args=(SERVICES[name](engine, settings), stop), name=name
        )
        for name in only
    ]
    for thread in threads:
        thread.start()
    log.info("controller runs %s.", ", ".join(only))
    ready()
    for thread in threads:
        thread.join()
    engine.dispose()
