"""`rollout limits`: the limits that all workers share for a model endpoint; changed live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import typer

from pipeline.contract.errors import ConfigError
from pipeline.contract.url_secrets import hide_passwords
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import ANY_MODEL, LimitStatus
from pipeline.limits.store import LimitStore
from rollout.deployment import borrowed, settings_of
from rollout.options import Json
from rollout.output import fields, print_json, print_table

limits = typer.Typer(help="Limit the calls to a model endpoint, live.", no_args_is_help=True)

T = TypeVar("T")


@limits.command()
def show(ctx: typer.Context, as_json: Json = False) -> None:
    """List limits with their granted and waiting calls."""
    rows = _with_store(ctx, lambda store: store.show())
    if as_json:
        print_json([_as_json(row) for row in rows])
    elif not rows:
        print("No limits are set. See: rollout limits set --help")
    else:
        heads = ["endpoint", "model", "limits", "in flight", "waiting", "granted", "paused until"]
        print_table(heads, [_as_cells(row) for row in rows])
        for row in rows:
            if row.unused_s is not None:
                print(_unused(row, rows))


@limits.command("set")
def set_(
    ctx: typer.Context,
    base_url: Annotated[str, typer.Option(help="The endpoint, as in the configuration of runs.")],
    model: Annotated[
        str | None,
        typer.Option(help="One model, as in the configuration of runs (default: all together)."),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Calls started per minute.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and response tokens per minute.")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Calls in flight.")] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, help="Extra calls in any second, above the limit.")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option(help="Adapt the concurrency to 429s, timeouts and latency.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Set the limits of an endpoint for all workers, or remove them.

    Workers apply them within about a second. Without any limit option the limits are removed.
    """
    wanted = LimitSettings(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrency=max_concurrency,
        burst=burst,
        adaptive=adaptive,
    )
    named = model or ANY_MODEL
    _with_store(ctx, lambda store: store.set(base_url, named, wanted))
    base_url = hide_passwords(base_url)
    if as_json:
        print_json({"endpoint": base_url, "model": named, "limits": _set_limits(wanted)})
    else:
        print(f"{_model(named)} at {base_url}: {_described(wanted) or 'no limits'}.")


def _with_store(ctx: typer.Context, work: Callable[[LimitStore], Awaitable[T]]) -> T:
    settings = ctx.with_resource(borrowed(settings_of(ctx), broker=True))
    url = settings.limits_redis_url
    if url is None:
        raise ConfigError(
            "Limits on model calls need Redis, and none is set.",
            why="The broker is not Redis, so calls are unlimited and only pause after 429s.",
            remedy="Set ROLLOUT_LIMITS__REDIS_URL, here and for the workers.",
        )

    async def run() -> T:
        store = LimitStore.connect(url, prefix=settings.limits_prefix)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _as_json(row: LimitStatus) -> dict[str, Any]:
    paused, since = row.backing_off_until, _unused_since(row)
    return fields(row, "endpoint", "model", "in_flight", "waiting", "granted", "cap") | {
        "limits": _set_limits(row.settings),
        "paused_until": paused.isoformat() if paused else None,
        "unused_since": since.isoformat() if since else None,
    }


def _as_cells(row: LimitStatus) -> list[str]:
    paused = row.backing_off_until
    return [
        row.endpoint,
        _model(row.model),
        _described(row.settings) or "none",
        f"{row.in_flight}/{row.cap}" if row.cap else str(row.in_flight),
        str(row.waiting),
        str(row.granted),
        f"{paused:%H:%M:%S}" if paused else "",
    ]


def _model(name: str) -> str:
    return "all models" if name == ANY_MODEL else name


def _unused_since(row: LimitStatus) -> datetime | None:
    return None if row.unused_s is None else datetime.now(UTC) - timedelta(seconds=row.unused_s)


def _unused(row: LimitStatus, rows: list[LimitStatus]) -> str:
    """Return a warning that a limit applies to no calls, with the models that are called."""
    line = (
        f"Limits of {_model(row.model)} at {row.endpoint} are set, but no call has been counted "
        f"under them since {_unused_since(row):%Y-%m-%d %H:%M:%S} UTC."
    )
    called = [other.model for other in rows if other.endpoint == row.endpoint and other.granted]
    others = [_model(name) for name in called if name != row.model]
    return f"{line} Calls there are made for: {', '.join(others)}." if others else line


def _set_limits(settings: Any) -> dict[str, Any]:
    return settings.model_dump(exclude_defaults=True) if settings else {}


def _described(settings: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in _set_limits(settings).items())
