"""The display of a run's progress: a live view on a terminal, otherwise lines.

`progress.py` uses it. All output goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType

from pipeline.store.status import RunStatus
from pipeline.store.wait_reasons import duration
from rollout.output import console, counts, note, number, safe_text
from rollout.pace import Pace
from rollout.tables import describe_calls

Show = Callable[["RunStatus"], None]

_LINE_EVERY_S = 10.0


@contextmanager
def display() -> Iterator[Show]:
    """Yield a function that shows a run's status."""
    pace = Pace()
    if not sys.stderr.isatty():
        yield _Lines(pace).show
        return
    from rich.live import Live

    with Live(console=console(sys.stderr), refresh_per_second=4, transient=True) as live:

        def show(status: RunStatus) -> None:
            _note_pace(pace, status)
            live.update(_view(status, pace))

        yield show


class _Lines:
    """Prints a line at intervals, for logs."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._due_at = time.monotonic() + _LINE_EVERY_S

    def show(self, status: RunStatus) -> None:
        _note_pace(self._pace, status)
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + _LINE_EVERY_S
            note(_line(status, self._pace))


def _note_pace(pace: Pace, status: RunStatus) -> None:
    tokens = status.prompt_tokens + status.completion_tokens
    pace.add(time.monotonic(), done=_done(status), tokens=tokens)


def _line(status: RunStatus, pace: Pace) -> str:
    return (
        f"{status.elapsed_s:.0f} s: run {status.run} has {_done(status)} of "
        f"{status.rollouts['total']} rollouts done ({counts(_but_total(status.rollouts))}), "
        f"reward {number(status.reward_mean)}, {_left(status, pace)}. "
        f"{' '.join((*status.waits, *status.warnings))}".rstrip()
    )


def _view(status: RunStatus, pace: Pace) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total, done = status.rollouts["total"], _done(status)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(status.run, style="bold"),
        ProgressBar(total=max(1, total), completed=done, width=40),
        Text(f"{done}/{total}"),
        Text(f"{number(pace.rollouts_per_s, 1)}/s, {_left(status, pace)}", style="dim"),
    )
    lines = [
        f"rollouts  {counts(_but_total(status.rollouts))}",
        f"groups    {counts(status.groups)}",
        f"reward    {number(status.reward_mean)} over {status.reward_n}",
        f"attempts  {status.attempts}   retries {status.retries}   workers {status.live_workers}"
        f"   tokens/s {number(pace.tokens_per_s, 0)}   elapsed {status.elapsed_s:.0f} s",
        *(f"calls     {line}" for line in describe_calls(status)),
        *status.waits,
        *status.warnings,
    ]
    return Group(bar, *(Text(safe_text(line)) for line in lines))


def _left(status: RunStatus, pace: Pace) -> str:
    left_s = pace.left_s(status.n_open)
    return "time left unknown" if left_s is None else f"{duration(left_s)} left"


def _done(status: RunStatus) -> int:
    return status.rollouts["total"] - status.n_open


def _but_total(rollouts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in rollouts.items() if name != "total"}
