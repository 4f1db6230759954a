"""Connections to Postgres: engine, transactions that outlive a hiccup, notifications.

Built at entry points, passed to the services. Every failure to reach the database becomes
`StoreUnavailable`. Must not: know tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg.types.array import ListBinaryDumper
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError

from pipeline.contract.errors import ConfigError, StoreUnavailable

#: Channels of NOTIFY; a listener is woken by them and polls slowly behind them.
WORK_CHANNEL = "rollout_work"
READY_CHANNEL = "rollout_ready"
#: Says which stored trajectories were scored again; see `rescores.py`.
RESCORED_CHANNEL = "rollout_rescored"

#: deadlock_detected, serialization_failure: the same transaction will do better the next time.
_RETRYABLE = frozenset({"40P01", "40001"})
_DISK_FULL = "53100"

#: Execution option of statements that return bodies: sent as they are, not as hexadecimal digits.
BINARY = "binary_results"

_NOTIFY = text("SELECT pg_notify(:channel, :payload)")

T = TypeVar("T")


class Bodies(list[bytes | None]):
    """Bodies for an array parameter: sent as they are, not as digits that Postgres must parse."""


psycopg.adapters.register_dumper(Bodies, ListBinaryDumper)


def open_engine(url: str, *, pool_size: int = 5, connect_timeout_s: float = 10) -> Engine:
    """Return an engine for a PostgreSQL URL; connects when first used.

    Raises:
        ConfigError: The URL is not one of PostgreSQL.
    """
    try:
        parsed = make_url(url)
    except Exception as error:
        raise ConfigError("The database URL cannot be read.", why=str(error)) from error
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigError(
            f"The database is {parsed.get_backend_name()}; the trajectory store needs PostgreSQL.",
            remedy="Set ROLLOUT_DATABASE__URL=postgresql://user@host/name, or unset it.",
        )
    engine = create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_size=pool_size,
        max_overflow=pool_size,
        connect_args={
            "connect_timeout": max(2, int(connect_timeout_s)),
            "application_name": "rollout",
            # The hot statements are few and always the same: prepare them at once.
            "prepare_threshold": 0,
        },
    )
    event.listen(engine, "before_cursor_execute", _choose_format)
    return engine


def _choose_format(
    _connection: Any, cursor: Any, _statement: Any, _parameters: Any, context: Any, _many: Any
) -> None:
    if context.execution_options.get(BINARY):
        cursor.format = psycopg.pq.Format.BINARY


def transact(engine: Engine, work: Callable[[Connection], T], *, tries: int = 3) -> T:
    """Run `work` in one transaction; again after a deadlock or a dropped connection.

    Raises:
        StoreUnavailable: Postgres did not answer; nothing was committed, or a commit went
            unanswered: all writes here are guarded, so doing them again is harmless.
    """
    for attempt in range(1, tries + 1):
        try:
            with engine.begin() as connection:
                return work(connection)
        except (DBAPIError, psycopg.Error) as error:  # COPY's errors come as psycopg's own
            state = _sqlstate(error)
            is_dropped = isinstance(error, DBAPIError) and error.connection_invalidated
            if attempt < tries and (state in _RETRYABLE or is_dropped):
                time.sleep(0.02 * attempt)
                continue
            is_theirs = isinstance(error, (OperationalError, psycopg.OperationalError))
            if is_theirs and state not in _RETRYABLE:
                raise unavailable(engine, error) from error
            raise
    raise AssertionError("unreachable")


def unavailable(engine: Engine, error: BaseException) -> StoreUnavailable:
    """Say for a person that Postgres cannot be reached."""
    said = str(getattr(error, "orig", error)).strip().splitlines()
    reason = (said[0] if said else type(error).__name__).rstrip(".") + "."
    place = engine.url.render_as_string(hide_password=True)
    if _sqlstate(error) == _DISK_FULL:
        return StoreUnavailable(
            f"The disk of Postgres at {place} is full.",
            why=reason,
            remedy="Make room there, and try again: what was committed stays.",
        )
    return StoreUnavailable(
        f"Postgres at {place} does not answer.",
        why=reason,
        remedy="Check ROLLOUT_DATABASE__URL, or start local services: rollout up",
    )


def _sqlstate(error: BaseException) -> str | None:
    return getattr(getattr(error, "orig", error), "sqlstate", None)


class Listener:
    """Waits for notifications; when the connection is lost, waiting becomes a plain poll."""

    def __init__(self, engine: Engine, *channels: str) -> None:
        self._engine = engine
        self._channels = channels
        self._connection: psycopg.Connection | None = None

    def wait(self, timeout_s: float) -> bool:
        """Return True at once when notified, False after `timeout_s` without news.

        Notifications that came while nobody waited count too. The first call only begins to
        listen and returns True: what was notified before could not be heard.
        """
        # One wake-up is enough for all that has piled up.
        return self.hear(timeout_s) != []

    def hear(self, timeout_s: float) -> list[str] | None:
        """Return the payloads of what was notified at once, [] after `timeout_s` without news.

        None: it only began to listen, as after a lost connection; what was notified before could
        not be heard.
        """
        try:
            if self._connection is None:
                self._connection = self._connect()
                return None
            heard = list(self._connection.notifies(timeout=timeout_s, stop_after=1))
            if heard:
                heard += self._connection.notifies(timeout=0)
            return [each.payload for each in heard]
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
        arguments, options = self._engine.dialect.create_connect_args(self._engine.url)
        connection = psycopg.connect(
            *arguments, **options, autocommit=True, connect_timeout=5, application_name="rollout"
        )
        for channel in self._channels:
            connection.execute(f"LISTEN {channel}".encode())
        return connection


def notify(connection: Connection, channel: str, payload: str = "") -> None:
    """Wake the listeners of a channel when this transaction commits.

    Args:
        connection: An open transaction.
        channel: Which listeners.
        payload: What they hear; less than 8,000 bytes.
    """
    values = {"channel": channel, "payload": payload}
    connection.execute(_NOTIFY, values)
