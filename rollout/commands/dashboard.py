"""`rollout flower`: the Flower dashboard of the workers' events: local, with password, read-only.

Flower runs in this process with our own options: no `flowerconfig.py`, no `FLOWER_*` variables.
"""

from __future__ import annotations

import os
import secrets
import signal
from datetime import UTC, datetime
from typing import Annotated

import typer

from pipeline.contract.errors import ConfigError, NotAllowed
from pipeline.queue.broker import broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.settings.sections import FlowerSettings
from rollout.deployment import borrowed, settings_of
from rollout.flower_view import end_silent_tasks, make_flower, note_since
from rollout.logs import log_to_stderr
from rollout.options import Json
from rollout.output import note, print_json

E_NO_EVENTS = "E132"

_POOL_SIZE = 64


def flower(
    ctx: typer.Context,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 takes a free one (default: 5555).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    as_json: Json = False,
) -> None:
    """Show live tasks in the browser, by Flower.

    The page is on loopback, has a password, and is read-only. It shows only events that workers
    send after its start. For the outcomes of runs use: rollout status.
    """
    settings = settings_of(ctx, {"flower": {"port": port, "host": host}})
    log_to_stderr(settings.log_level)
    broker = broker_of(ctx.with_resource(borrowed(settings, broker=True)))
    if not broker.has_remote_control:
        raise NotAllowed(
            "Flower would show nothing with SQS.",
            why="SQS has no broadcasts, so workers send no events.",
            remedy="Follow runs by: rollout watch, rollout status, rollout errors.",
            code=E_NO_EVENTS,
        )
    app = make_celery_app(broker)
    # Each of Flower's inspect requests takes two connections, and it makes a dozen at once. With a
    # small pool they would deadlock.
    app.conf.broker_pool_limit = _POOL_SIZE
    made = settings.flower.password is None
    password = secrets.token_urlsafe(12)
    if settings.flower.password is not None:
        password = settings.flower.password.get_secret_value()
    about = note_since(datetime.now(UTC))
    dashboard = make_flower(app, settings.flower, password, about)
    try:
        bound = dashboard.start_http_server()
    except OSError as error:
        raise ConfigError(
            f"Flower cannot listen on {settings.flower.host}:{settings.flower.port}.",
            why=f"{error.strerror}.",
            remedy="Choose another --port, or 0 for any free one.",
        ) from error
    _announce(settings.flower, bound, password if made else None, about, as_json=as_json)
    end_silent_tasks(dashboard, settings.lease.lease_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: dashboard.io_loop.add_callback_from_signal(dashboard.stop))
    dashboard.start()


def _announce(
    settings: FlowerSettings, port: int, password: str | None, about: str, *, as_json: bool
) -> None:
    """Print Flower's URL; a generated password is printed only here."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    if as_json:
        document = {"ready": True, "url": url, "user": settings.user, "pid": os.getpid()}
        print_json(document | ({"password": password} if password else {}))
        return
    note(f"Flower is at {url}, user {settings.user}.")
    if password:
        note(f"Password: {password} (set ROLLOUT_FLOWER__PASSWORD to keep one)")
    note(about)
