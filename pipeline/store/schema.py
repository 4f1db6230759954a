"""Schema revisions: upgrade, current, and the check that every process makes at start.

Used by `rollout db`, `rollout up` and the entry points. The migrations are files that Alembic
loads by path: in the repository a link leads to its folder `migrations`, in a wheel they are data.
Every command checks the schema, so Alembic, which takes 0.2 s to import, is loaded to upgrade only.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from pipeline.contract.errors import SchemaOutdated
from pipeline.store.engine import translated

MIGRATIONS = Path(__file__).with_name("migrations")

#: Key of the advisory lock under which only one process at a time upgrades.
_UPGRADE_LOCK = 0x726F6C6C


def upgrade(engine: Engine) -> str:
    """Bring the database to the newest revision and return it; safe to call concurrently."""
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _UPGRADE_LOCK})
            try:
                if _current(connection) != head():
                    connection.rollback()
                    _run_migrations(connection)
            finally:
                connection.rollback()
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _UPGRADE_LOCK})
                connection.commit()
    except OperationalError as error:
        raise translated(engine, error) from error
    return head()


def current(engine: Engine) -> str | None:
    """Return the database's revision, None where it has none."""
    try:
        with engine.connect() as connection:
            return _current(connection)
    except OperationalError as error:
        raise translated(engine, error) from error


def head() -> str:
    """Return the newest revision this version knows; each file's name begins with its revision."""
    newest = max(path.name for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))
    return newest.partition("_")[0]


def require_current(engine: Engine) -> None:
    """Check that the database has the schema this version needs.

    Raises:
        SchemaOutdated: The database has another schema.
        StoreUnavailable: Postgres does not answer.
    """
    found = current(engine)
    if found != head():
        raise SchemaOutdated(
            f"The database has schema {found or 'none'}; this version needs {head()}.",
            remedy="Run: rollout db upgrade",
        )


def _current(connection: Connection) -> str | None:
    if connection.scalar(text("SELECT to_regclass('alembic_version')")) is None:
        return None
    return connection.scalar(text("SELECT version_num FROM alembic_version"))


def _run_migrations(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
