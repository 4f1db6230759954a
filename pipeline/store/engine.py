"""Connections to Postgres: engine, transactions that are retried, notifications.

Entry points build the engine and pass it to the services. `transact` turns the errors of Postgres
into those of the pipeline, by the table in `faults.py`. Must not: know tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import psycopg
from psycopg.types.array import ListBinaryDumper
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from pipeline.contract.errors import ConfigError, StoreRejected, StoreUnavailable
from pipeline.contract.url_secrets import hide_passwords, without_passwords
from pipeline.settings.keepalive import Keepalive
from pipeline.store.database_url import bound_session, network_options, read_url
from pipeline.store.faults import Fault, fault_of, reason_of, sqlstate_of

#: Channels of NOTIFY. Listeners also poll slowly, in case a notification is lost.
WORK_CHANNEL = "rollout_work"
READY_CHANNEL = "rollout_ready"
#: Sent when requested rescores have ended; see `rescore_requests.py`.
RESCORED_CHANNEL = "rollout_rescored"

_DISK_FULL = "53100"
_READ_ONLY = "25006"
#: Attempts of one transaction.
_TRIES = 3

#: Execution option of statements that return bodies: sent as bytes, not as hexadecimal digits.
BINARY = "binary_results"

_NOTIFY = text("SELECT pg_notify(:channel, :payload)")
_NOW = text("SELECT now()")

P = ParamSpec("P")
T = TypeVar("T")


class Bodies(list[bytes | None]):
    """Bodies for an array parameter, sent as bytes and not as digits that Postgres must parse."""


psycopg.adapters.register_dumper(Bodies, ListBinaryDumper)


def open_engine(
    url: str,
    *,
    pool_size: int = 5,
    connect_timeout_s: float = 10,
    network_timeout_s: float = 20,
) -> Engine:
    """Return an engine for a PostgreSQL URL; connects when first used.

    Raises:
        ConfigError: The URL is not one of PostgreSQL.
    """
    parsed, secret_options = read_url(url)
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigError(
            f"The database is {parsed.get_backend_name()}; the trajectory store needs PostgreSQL.",
            remedy="Set ROLLOUT_DATABASE__URL=postgresql://user@host/name, or unset it.",
        )
    keepalive = Keepalive(network_timeout_s)
    engine = create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_size=pool_size,
        max_overflow=pool_size,
        connect_args={
            "connect_timeout": max(2, int(connect_timeout_s)),
            "application_name": "rollout",
            # Prepare at the first execution: the frequent statements are few and do not vary.
            "prepare_threshold": 0,
            **secret_options,
            **network_options(parsed, keepalive),
        },
    )
    event.listen(engine, "connect", bound_session(keepalive))
    event.listen(engine, "before_cursor_execute", _choose_format)
    return engine


def address_of(engine: Engine) -> str:
    """Return the address of an engine's database, for logs and messages."""
    return hide_passwords(engine.url.render_as_string(hide_password=False))


def _choose_format(
    _connection: Any, cursor: Any, _statement: Any, _parameters: Any, context: Any, _many: Any
) -> None:
    if context.execution_options.get(BINARY):
        cursor.format = psycopg.pq.Format.BINARY


def transact(
    engine: Engine,
    work: Callable[Concatenate[Connection, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call `work(connection, *args, **kwargs)` in one transaction.

    The call is repeated after a conflict or a dropped connection.

    Raises:
        StoreUnavailable: Postgres did not answer, or each try conflicted with other transactions.
            Either nothing was committed, or the answer to the commit was lost; all writes are
            guarded, so repeating them is harmless.
        StoreRejected: Postgres refuses the data; nothing was committed.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            with engine.begin() as connection:
                return work(connection, *args, **kwargs)
        except (DBAPIError, psycopg.Error) as error:  # COPY's errors come as psycopg's own
            fault = fault_of(error)
            is_dropped = isinstance(error, DBAPIError) and error.connection_invalidated
            if sqlstate_of(error) == _READ_ONLY:
                # After a failover all connections are to the old primary: make new ones.
                engine.dispose()
                is_dropped = True
            if attempt < _TRIES and (fault is Fault.CONFLICT or is_dropped):
                time.sleep(0.02 * attempt)
                continue
            if fault in (Fault.SCHEMA, Fault.OTHER):
                raise
            raise translated(engine, error) from error
    raise AssertionError("unreachable")


def translated(engine: Engine, error: BaseException) -> StoreUnavailable | StoreRejected:
    """Return the pipeline's error for one of Postgres, explained to a person."""
    url = engine.url.render_as_string(hide_password=False)
    reason = without_passwords(reason_of(error), url).rstrip(".") + "."
    address = address_of(engine)
    fault = fault_of(error)
    if fault is Fault.DATA:
        return StoreRejected(
            "Postgres refuses what was to be stored.",
            why=reason,
            remedy="The same data would be refused again; correct what the reason names.",
        )
    if fault in (Fault.CONFLICT, Fault.RESOURCES):
        return StoreUnavailable(f"Postgres at {address} could not run the transaction.", why=reason)
    if sqlstate_of(error) == _DISK_FULL:
        return StoreUnavailable(
            f"The disk of Postgres at {address} is full.",
            why=reason,
            remedy="Make room there, and try again. Committed data stays.",
        )
    return StoreUnavailable(
        f"Postgres at {address} does not answer.",
        why=reason,
        remedy="Check ROLLOUT_DATABASE__URL, or start local services: rollout up",
    )


class Listener:
    """Waits for notifications; while the connection is lost, each wait just takes its timeout."""

    def __init__(self, engine: Engine, *channels: str) -> None:
        self._engine = engine
        self._channels = channels
        self._connection: psycopg.Connection | None = None
        self._pool = engine.pool

    def wait(self, timeout_s: float) -> bool:
        """Return True at once when notified, False after `timeout_s` without notification.

        Notifications between two calls count too. The first call only begins to listen and returns
        True, because earlier notifications were not received.
        """
        return self.hear(timeout_s) != []

    def hear(self, timeout_s: float) -> list[str] | None:
        """Return the payloads of notifications as soon as there are any, [] after `timeout_s`.

        None means that the connection was just opened: earlier notifications were not received.
        """
        if self._pool is not self._engine.pool:
            self.close()  # the engine has left a server that became read-only
        try:
            if self._connection is None:
                self._connection = self._connect()
                return None
            received = list(self._connection.notifies(timeout=timeout_s, stop_after=1))
            if received:
                received += self._connection.notifies(timeout=0)
            return [each.payload for each in received]
        except psycopg.Error:
            self.close()
            time.sleep(min(timeout_s, 1.0))
            return []

    def close(self) -> None:
        """Stop listening."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> psycopg.Connection:
        # The connection of a new, empty pool: made with the engine's options, and used here alone.
        self._pool = self._engine.pool
        opened = self._pool.recreate().connect()
        connection = cast("psycopg.Connection", opened.driver_connection)
        opened.detach()
        connection.autocommit = True
        for channel in self._channels:
            connection.execute(f"LISTEN {channel}".encode())
        return connection


def store_time(connection: Connection) -> datetime:
    """Return the time at which this transaction began, by the clock of Postgres."""
    return connection.execute(_NOW).scalar_one()


def notify(connection: Connection, channel: str, payload: str = "") -> None:
    """Wake the listeners of a channel when this transaction commits.

    Args:
        connection: An open transaction.
        channel: The channel of the listeners.
        payload: Less than 8,000 bytes.
    """
    values = {"channel": channel, "payload": payload}
    connection.execute(_NOTIFY, values)
