"""Checks of this machine and of the configured services; each problem has a remedy.

Used by `rollout doctor`. Must not: change anything.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import typer
from sqlalchemy import Engine

from pipeline.contract.errors import PipelineError
from pipeline.contract.url_secrets import hide_passwords
from pipeline.embedded.postgres_programs import installations
from pipeline.embedded.redis_programs import find_program
from pipeline.hidden_packages import find_hidden
from pipeline.queue.broker import broker_of
from pipeline.queue.payloads import open_payloads
from pipeline.redaction import Redactor
from pipeline.settings import Settings
from pipeline.store import schema
from pipeline.store.engine import address_of, store_time, transact
from rollout.check_result import Check, failed, guarded
from rollout.deployment import borrowed, engine_of, private_services, settings_of
from rollout.endpoint_checks import check_endpoints
from workers.sandbox.kinds import choose_local, obstacle_of
from workers.tools.mcp_servers import MCP_PREFIX, MCPServerError, MCPServers

_PROBE_S = 2.0
_MCP_OPEN_S = 15.0
_MIN_FREE_BYTES = 200 * 2**20
_LOW_FREE_BYTES = 2 * 2**30
_MAX_CLOCK_SKEW_S = 5.0

_SANDBOX_REMEDY = (
    "For coding agents and python_tests: install bubblewrap and allow user namespaces."
)

#: The purpose of each optional package.
_OPTIONAL = {
    "pyarrow": "Parquet files",
    "datasets": "Hugging Face datasets",
    "anthropic": "Claude",
    "pycurl": "SQS",
}


def run_checks(ctx: typer.Context) -> Iterator[Check]:
    """Yield the checks; with unreadable settings only those that need no settings."""
    yield _python()
    yield _packages()
    yield _names()
    try:
        settings = settings_of(ctx)
    except PipelineError as error:
        yield failed("settings", error)
        return
    yield Check("settings", "ok", f"data directory {settings.data_dir}")
    yield guarded("database", partial(_database, settings))
    yield guarded("broker", partial(_broker, settings))
    yield from check_endpoints(settings)
    for name, check in (("disk", _disk), ("payloads", _payloads), ("sandbox", _sandbox)):
        yield guarded(name, partial(check, settings))
    yield from asyncio.run(_mcp_servers(settings))


def _python() -> Check:
    return Check("python", "ok", ".".join(map(str, sys.version_info[:3])))


def _packages() -> Check:
    missing = [
        f"{name} ({purpose})"
        for name, purpose in _OPTIONAL.items()
        if importlib.util.find_spec(name) is None
    ]
    if not missing:
        return Check("packages", "ok", "all optional ones are installed")
    return Check("packages", "ok", f"not installed: {', '.join(missing)}")


def _names() -> Check:
    """Find files that hide our packages from commands (by PYTHONPATH) or from scripts here."""
    everywhere, here = find_hidden(), find_hidden(Path.cwd())
    if not here:
        return Check("names", "ok", "nothing hides our packages")
    hidden = ", ".join(f"`{name}` by {place}" for name, place in here.items())
    detail = f"hidden from {'all commands' if everywhere else 'scripts in this folder'}: {hidden}"
    remedy = "Rename what hides them, or keep scripts that import them elsewhere."
    return Check("names", "failed" if everywhere else "warning", detail, remedy, 3)


def _database(settings: Settings) -> Check:
    if settings.embedded_database:
        state = _private_state(settings, "postgres", installations)
        if state.status != "ok" or "runs" not in state.detail:
            return state
    with borrowed(settings, database=True) as settings:
        return _schema_and_clock(settings)


def _schema_and_clock(settings: Settings) -> Check:
    quick = settings.database.model_copy(update={"connect_timeout_s": _PROBE_S})
    engine = engine_of(settings.model_copy(update={"database": quick}))
    try:
        schema.require_current(engine)
        skew_s = _clock_skew_s(engine)
    finally:
        engine.dispose()
    place = address_of(engine)
    if abs(skew_s) > _MAX_CLOCK_SKEW_S:
        detail = f"its clock and this machine's differ by {skew_s:.0f} s"
        return Check("database", "warning", detail, "Synchronise the clocks (NTP).")
    return Check("database", "ok", f"{place}, schema {schema.head()}")


def _clock_skew_s(engine: Engine) -> float:
    asked = time.time()
    theirs = transact(engine, store_time)
    return theirs.timestamp() - (asked + time.time()) / 2


def _broker(settings: Settings) -> Check:
    if settings.embedded_broker:
        return _private_state(settings, "redis", find_program)
    quick = settings.broker.model_copy(update={"connect_timeout_s": _PROBE_S})
    broker = broker_of(settings.model_copy(update={"broker": quick}))
    connection = broker.connect()
    with broker.driver_errors(), connection:
        connection.ensure_connection(max_retries=1, timeout=_PROBE_S)
    return Check("broker", "ok", broker.place)


def _private_state(settings: Settings, server: str, find: Callable[[], object]) -> Check:
    name = "database" if server == "postgres" else "broker"
    found = next(s for s in private_services(settings).status() if s.name == server)
    if found.running:
        return Check(name, "ok", f"a private {server} runs (pid {found.pid})")
    find()
    return Check(name, "ok", f"a private {server} will be started when it is needed")


def _disk(settings: Settings) -> Check:
    free = shutil.disk_usage(_existing(settings.data_dir)).free
    detail = f"{free / 2**30:.1f} GiB free for {settings.data_dir}"
    if free < _MIN_FREE_BYTES:
        return Check("disk", "failed", detail, "Free some space, or choose another --data-dir.", 6)
    return Check("disk", "warning" if free < _LOW_FREE_BYTES else "ok", detail)


def _payloads(settings: Settings) -> Check:
    named = settings.payloads.url
    url = named.get_secret_value() if named else None
    if url is not None and urlsplit(url).scheme != "file":
        store = open_payloads(settings)
        store.get(store.uri("rollout-doctor"))
        return Check("payloads", "ok", hide_passwords(url))
    folder = Path(unquote(urlsplit(url).path)) if url else settings.data_dir / "payloads"
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return Check("payloads", "ok", str(folder))
    except OSError as error:
        remedy = "Make it writable, or set ROLLOUT_PAYLOADS__URL."
        return Check("payloads", "failed", f"{folder}: {error.strerror}", remedy, 6)


def _sandbox(settings: Settings) -> Check:
    kind = settings.worker.sandbox
    if kind == "process":
        detail = "process: commands that a model wrote run unconfined (worker.sandbox)"
        return Check("sandbox", "warning", detail, "Set ROLLOUT_WORKER__SANDBOX=auto.")
    if kind != "auto":
        reason = obstacle_of(kind)
        detail = f"{kind} does not run here ({reason})" if reason else kind
        return Check(
            "sandbox", "failed" if reason else "ok", detail, _SANDBOX_REMEDY * bool(reason)
        )
    choice = choose_local()
    reasons = "".join(f"; {name}: {reason}" for name, reason in choice.obstacles.items())
    detail = f"{choice.kind or 'none'}: {choice.confines}{reasons}"
    is_whole = choice.kind not in (None, "process")
    return Check(
        "sandbox", "ok" if is_whole else "warning", detail, "" if is_whole else _SANDBOX_REMEDY
    )


async def _mcp_servers(settings: Settings) -> list[Check]:
    """Open the MCP servers of the settings, all at the same time, and close them again."""
    servers = {name: server.arguments() for name, server in settings.worker.mcp.items()}
    redactor = Redactor.of(settings, {})

    async def check(name: str) -> Check:
        title = f"{MCP_PREFIX}{name}"
        opened = MCPServers({name: servers[name]}, open_timeout_s=_MCP_OPEN_S)
        try:
            tools = await opened.tools([name])
        except MCPServerError as error:
            remedy = f"Correct worker.mcp.{name}, or start the server that its url names."
            return Check(title, "failed", redactor.text(str(error)), remedy, 6)
        finally:
            await opened.close()
        return Check(title, "ok", f"tools: {', '.join(tools) or 'none'}")

    return await asyncio.gather(*map(check, servers))


def _existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
