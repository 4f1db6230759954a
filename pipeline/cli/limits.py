"""`rollout limits`: what all workers together may ask of a model endpoint; changed live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pipeline.cli.deployment import borrowed, settings_of
from pipeline.cli.options import Json
from pipeline.cli.output import print_json, print_table

if TYPE_CHECKING:
    from pipeline.limits.status import LimitStatus
    from pipeline.limits.store import LimitStore

limits = typer.Typer(help="Limit the calls to a model endpoint, live.", no_args_is_help=True)

T = TypeVar("T")


@limits.command()
def show(ctx: typer.Context, as_json: Json = False) -> None:
    """List limits, what they granted, and who waits."""
    rows = _with_store(ctx, lambda store: store.show())
    if as_json:
        print_json([_as_json(row) for row in rows])
    elif not rows:
        print("No limits are set. See: rollout limits set --help")
    else:
        heads = ["endpoint", "model", "limits", "in flight", "waiting", "granted", "paused until"]
        print_table(heads, [_as_cells(row) for row in rows])


@limits.command("set")
def set_(
    ctx: typer.Context,
    base_url: Annotated[str, typer.Option(help="The endpoint, as runs name it.")],
    model: Annotated[str, typer.Option(help="The model, as runs name it.")] = "default",
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Calls started per minute.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and response tokens per minute.")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Calls in flight.")] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, help="Calls above the pace in any second.")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option(help="Let the cap follow 429s, timeouts and latency.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put limits in force for all workers, or lift them.

    Workers follow within about a second. Without any limit named, there is none.
    """
    from pipeline.limits.settings import LimitSettings

    wanted = LimitSettings(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrency=max_concurrency,
        burst=burst,
        adaptive=adaptive,
    )
    _with_store(ctx, lambda store: store.set(base_url, model, wanted))
    if as_json:
        print_json({"endpoint": base_url, "model": model, "limits": _set_limits(wanted)})
    else:
        told = _described(wanted)
        print(f"{model} at {base_url}: {told or 'no limits'}.")


def _with_store(ctx: typer.Context, work: Callable[[LimitStore], Awaitable[T]]) -> T:
    import asyncio

    from pipeline.contract.errors import ConfigError
    from pipeline.limits.store import LimitStore

    settings = ctx.with_resource(borrowed(settings_of(ctx), broker=True))
    url = settings.limits_redis_url
    if url is None:
        raise ConfigError(
            "Limits are shared through Redis, and none is known.",
            why="The broker is another, so each worker limits only itself.",
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
    paused = row.backing_off_until
    return {
        "endpoint": row.endpoint,
        "model": row.model,
        "limits": _set_limits(row.settings),
        "in_flight": row.in_flight,
        "waiting": row.waiting,
        "granted": row.granted,
        "cap": row.cap,
        "paused_until": paused.isoformat() if paused else None,
    }


def _as_cells(row: LimitStatus) -> list[str]:
    paused = row.backing_off_until
    return [
        row.endpoint,
        row.model,
        _described(row.settings) or "none",
        f"{row.in_flight}/{row.cap}" if row.cap else str(row.in_flight),
        str(row.waiting),
        str(row.granted),
        f"{paused:%H:%M:%S}" if paused else "",
    ]


def _set_limits(settings: Any) -> dict[str, Any]:
    return settings.model_dump(exclude_defaults=True) if settings else {}


def _described(settings: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in _set_limits(settings).items())
