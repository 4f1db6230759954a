"""Private servers of one benchmark: started in a temporary folder, and removed at its end.

The benchmarks of the store, the broker and the pipeline use it. Must not: measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from pipeline.embedded import EmbeddedServices
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher
from pipeline.settings import load_settings


@contextmanager
def private_services() -> Iterator[tuple[EmbeddedServices, Path]]:
    """Yield durable servers, not started, and the folder with their data."""
    with TemporaryDirectory(prefix="rb-") as name:
        folder = Path(name)
        # For root, Postgres runs as another account, which must be able to enter.
        folder.chmod(0o755)
        services = EmbeddedServices(folder / "data")
        try:
            yield services, folder
        finally:
            services.remove()


@contextmanager
def private_broker() -> Iterator[tuple[RequestPublisher, redis.Redis]]:
    """Yield a publisher of requests on a new Redis, and a client of this Redis."""
    with private_services() as (services, folder):
        settings = load_settings(
            overrides={"broker": {"url": services.start_redis()}}, start=folder
        )
        publisher = RequestPublisher(broker_of(settings), expires_s=3600)
        client = redis.Redis.from_url(services.redis_client_url)
        try:
            yield publisher, client
        finally:
            client.close()
            publisher.close()
