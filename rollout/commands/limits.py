"""`rollout limits`: the limits that all workers share for a model endpoint; changed live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from pipeline.contract.errors import ConfigError
from pipeline.contract.url_secrets import hide_passwords
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import ANY_MODEL
from pipeline.limits.store import LimitStore
from rollout.deployment import borrowed, settings_of
from rollout.limit_tables import described, limit_document, model_title, print_limits, set_limits
from rollout.options import Json
from rollout.output import print_answer, print_json

limits = typer.Typer(no_args_is_help=True)

T = TypeVar("T")


@limits.command()
def show(ctx: typer.Context, as_json: Json = False) -> None:
    """List limits with their granted and waiting calls."""
    rows = _with_store(ctx, lambda store: store.show())
    if as_json:
        print_json([limit_document(row) for row in rows])
    elif not rows:
        print("No limits are set. See: rollout limits set --help")
    else:
        print_limits(rows)


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
    print_answer(
        {"endpoint": base_url, "model": named, "limits": set_limits(wanted)},
        f"{model_title(named)} at {base_url}: {described(wanted) or 'no limits'}.",
        as_json=as_json,
    )


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
