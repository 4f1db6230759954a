"""Kombu's transport for Redis, with less work for each message.

`broker.py` names it for every connection to Redis. The work that is left out here would take a
tenth of the time of a worker's Celery thread (docs/performance.md). Must not: know messages of the
pipeline, or change when a message counts as received or acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from kombu.transport import redis


class QoS(redis.QoS):
    """The messages received and not yet acknowledged."""

    @contextmanager
    def pipe_or_acquire(self, pipe: Any = None, client: Any = None) -> Iterator[Any]:
        """Yield the given pipeline, or a new one without a transaction.

        The two commands of a delivery tag, which set or remove its message and its time, are sent
        together in either case. No process reads one without the other before the visibility
        timeout.
        """
        if pipe is not None:
            yield pipe
            return
        with self.channel.conn_or_acquire(client) as connected:
            yield connected.pipeline(transaction=False)


class Channel(redis.Channel):
    """A channel with one client for all its commands; kombu makes one for each command."""

    QoS = QoS
    _client_of_pool: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous=True)
        # Kombu drops the pool when it disconnects, and makes another one.
        if self._client_of_pool is None or self._client_of_pool.connection_pool is not self.pool:
            self._client_of_pool = super()._create_client()
        return self._client_of_pool


class Transport(redis.Transport):
    """The transport that kombu makes from the URL of the broker."""

    Channel: ClassVar[type[Any]] = Channel
