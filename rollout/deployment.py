"""The environment of a command: settings, private servers where no URL is set, an open store.

This is the composition root of the command line. Without a database or broker URL the private
servers of the data directory are started on demand. Commands that start background processes keep
the servers until `rollout down`. All others borrow them: the last borrower stops them (ADR 0028).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import typer

from pipeline.contract.errors import NotFound
from rollout.output import note

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from pipeline.embedded import Borrowed, EmbeddedServices
    from pipeline.settings import Settings
    from pipeline.store.runs import Run

E_NO_DATA = "E121"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Deployment:
    """Settings with every URL resolved, and the store."""

    settings: Settings
    engine: Engine

    def transact(
        self,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `work(connection, *args, **kwargs)` in one transaction."""
        from pipeline.store.engine import transact

        return transact(self.engine, work, *args, **kwargs)

    def find_run(self, name: str) -> Run:
        """Return the run with this name, with this unique prefix, or for `@last` the newest.

        Raises:
            NotFound: No run matches, or several do.
        """
        from pipeline.store.runs import find_run

        return self.transact(find_run, name)

    def find_exactly(self, slug: str) -> Run | None:
        """Return the run with exactly this name, or None."""
        from pipeline.store.runs import get_run

        try:
            return self.transact(get_run, slug)
        except NotFound:
            return None


def settings_of(ctx: typer.Context, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings with the options before the command; the data directory is absolute.

    Raises:
        ConfigError: A setting is invalid.
    """
    from pipeline.settings import load_settings

    settings = load_settings(overrides={**ctx.obj, **(overrides or {})})
    return settings.model_copy(update={"data_dir": settings.data_dir.expanduser().resolve()})


def private_services(settings: Settings) -> EmbeddedServices:
    """Return the private servers of the data directory."""
    from pipeline.embedded import EmbeddedServices

    return EmbeddedServices(settings.data_dir)


def with_broker(settings: Settings) -> Settings:
    """Return settings with a broker URL; start the private broker if necessary."""
    if not settings.embedded_broker:
        return settings
    return _with_url(settings, "broker", private_services(settings).start_redis())


@contextmanager
def borrowed(
    settings: Settings, *, database: bool = False, broker: bool = False
) -> Iterator[Settings]:
    """Yield settings with the servers' URLs; private servers run at least during the block."""
    services = private_services(settings)
    with ExitStack() as stack:
        if database and settings.embedded_database:
            server = stack.enter_context(services.borrow_postgres())
            settings = _with_url(settings, "database", _announced(server, "PostgreSQL").url)
        if broker and settings.embedded_broker:
            server = stack.enter_context(services.borrow_redis())
            settings = _with_url(settings, "broker", _announced(server, "Redis").url)
        yield settings


@contextmanager
def open_deployment(
    settings: Settings, *, broker: bool = False, create: bool = False, stay: bool = True
) -> Iterator[Deployment]:
    """Open the store: a private one is migrated here, another must be migrated already.

    Args:
        settings: As `settings_of` returns them.
        broker: Whether the command needs a broker too.
        create: Whether a data directory may be created; else a missing one is an error.
        stay: Whether private servers go on after the block, until `rollout down`.

    Raises:
        ConfigError: The broker's URL is of no known kind.
        NotFound: There is no private store here, and `create` is false.
        SchemaOutdated: The configured database was not migrated.
        StoreUnavailable: The database does not answer.
    """
    if broker and not settings.embedded_broker:
        from pipeline.queue.broker import broker_of

        broker_of(settings)  # an error must come before any server is started
    is_private = settings.embedded_database
    if is_private and not create:
        _require_data(settings.data_dir)
    with ExitStack() as stack:
        if not stay:
            settings = stack.enter_context(borrowed(settings, database=True, broker=broker))
        elif is_private:
            url = private_services(settings).start_postgres()
            settings = _with_url(settings, "database", url)
        engine = engine_of(settings)
        stack.callback(engine.dispose)
        _prepare_schema(engine, is_private=is_private)
        yield Deployment(with_broker(settings) if broker else settings, engine)


def engine_of(settings: Settings) -> Engine:
    """Return an engine for the database in the settings."""
    from pipeline.store.engine import open_engine

    assert settings.database.url is not None
    return open_engine(
        settings.database.url.get_secret_value(),
        pool_size=settings.database.pool_size,
        connect_timeout_s=settings.database.connect_timeout_s,
        network_timeout_s=settings.database.network_timeout_s,
    )


@contextmanager
def borrowed_store(settings: Settings) -> Iterator[Engine]:
    """Connect to the database without migrating it; a private one runs during the block."""
    with borrowed(settings, database=True) as settings:
        engine = engine_of(settings)
        try:
            yield engine
        finally:
            engine.dispose()


@contextmanager
def opened(ctx: typer.Context, **options: Any) -> Iterator[Deployment]:
    """Open the deployment for this command only; options are those of `open_deployment`."""
    with open_deployment(settings_of(ctx), stay=False, **options) as deployment:
        yield deployment


def _announced(server: Borrowed, title: str) -> Borrowed:
    """Note that a server runs for this command only; exit on signals, so that it is stopped."""
    if server.is_temporary:
        note(f"The private {title} server runs for this command only: `rollout up` keeps it.")
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    return server


def _prepare_schema(engine: Engine, *, is_private: bool) -> None:
    from pipeline.store import schema

    if is_private:
        schema.upgrade(engine)
    else:
        schema.require_current(engine)


def _require_data(data_dir: Path) -> None:
    if (data_dir / "postgres").exists() or (data_dir / "services.json").exists():
        return
    raise NotFound(
        f"There are no runs in {data_dir}.",
        remedy="Begin with `rollout run`, go to the folder where you began, or name it with "
        "--data-dir (or ROLLOUT_DATABASE__URL).",
        code=E_NO_DATA,
    )


def _with_url(settings: Settings, section: str, url: str) -> Settings:
    from pydantic import SecretStr

    changed = getattr(settings, section).model_copy(update={"url": SecretStr(url)})
    return settings.model_copy(update={section: changed})
