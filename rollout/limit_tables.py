"""The output of `rollout limits`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import ANY_MODEL, LimitStatus
from rollout.output import fields, print_table


def print_limits(rows: Sequence[LimitStatus]) -> None:
    """Print limits with their calls, and a warning for each that applies to no calls."""
    heads = ("endpoint", "model", "limits", "in flight", "waiting", "granted", "paused until")
    print_table(heads, [_cells(row) for row in rows])
    for row in rows:
        if row.unused_s is not None:
            print(_unused(row, rows))


def limit_document(row: LimitStatus) -> dict[str, Any]:
    """Return a row of `rollout limits show --json`."""
    paused, since = row.backing_off_until, _unused_since(row)
    return fields(row, "endpoint", "model", "in_flight", "waiting", "granted", "cap") | {
        "limits": set_limits(row.settings),
        "paused_until": paused.isoformat() if paused else None,
        "unused_since": since.isoformat() if since else None,
    }


def _cells(row: LimitStatus) -> list[str]:
    paused = row.backing_off_until
    return [
        row.endpoint,
        model_title(row.model),
        described(row.settings) or "none",
        f"{row.in_flight}/{row.cap}" if row.cap else str(row.in_flight),
        str(row.waiting),
        str(row.granted),
        f"{paused:%H:%M:%S}" if paused else "",
    ]


def model_title(name: str) -> str:
    """Return the name of a model in a sentence."""
    return "all models" if name == ANY_MODEL else name


def _unused_since(row: LimitStatus) -> datetime | None:
    return None if row.unused_s is None else datetime.now(UTC) - timedelta(seconds=row.unused_s)


def _unused(row: LimitStatus, rows: Sequence[LimitStatus]) -> str:
    """Return a warning that a limit applies to no calls, with the models that are called."""
    line = (
        f"Limits of {model_title(row.model)} at {row.endpoint} are set, but no call has been "
        f"counted under them since {_unused_since(row):%Y-%m-%d %H:%M:%S} UTC."
    )
    called = [other.model for other in rows if other.endpoint == row.endpoint and other.granted]
    others = [model_title(name) for name in called if name != row.model]
    return f"{line} Calls there are made for: {', '.join(others)}." if others else line


def set_limits(settings: LimitSettings | None) -> dict[str, Any]:
    """Return the limits that are set, by their names."""
    return settings.model_dump(exclude_defaults=True) if settings else {}


def described(settings: LimitSettings | None) -> str:
    """Return the limits that are set as text; empty if there are none."""
    return ", ".join(f"{key}={value}" for key, value in set_limits(settings).items())
