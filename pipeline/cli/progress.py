"""Waiting for a run, and what is shown meanwhile: a live view on a terminal, lines elsewhere.

Used by `run`, `resume`, `watch` and the demo. Everything here goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.cli.deployment import Deployment
from pipeline.cli.output import console, counts, note, number, safe_text
from pipeline.contract.errors import WaitTimeout
from pipeline.contract.rollout import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipeline.store.runs import Run
    from pipeline.store.status import RunStatus

Show = Callable[["RunStatus"], None]

_REFRESH_S = 0.5
_LINE_EVERY_S = 10.0
#: Notifications come with every commit; looking at each would be work for nothing.
_THROTTLE_S = 0.05


def wait_for_run(
    deployment: Deployment,
    run: Run,
    *,
    check: Callable[[], None] = lambda: None,
    timeout_s: float | None = None,
    after_timeout: str = "It goes on; follow it: rollout watch",
) -> RunStatus:
    """Wait until a run is done, or paused for its failures; return its figures then.

    Args:
        deployment: The store.
        run: What to wait for.
        check: Called again and again; raises where waiting is of no use any more.
        timeout_s: Longest wait; None: for ever.
        after_timeout: What becomes of the run then, and the command to go on with.

    Raises:
        WaitTimeout: The time is up; says what the run waits for.
    """
    from pipeline.store.engine import READY_CHANNEL, Listener
    from pipeline.store.status import run_state, run_status

    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    listener = Listener(deployment.engine, READY_CHANNEL)
    show_at = 0.0
    try:
        with _display() as show:
            while True:
                state = deployment.transact(lambda connection: run_state(connection, run))
                is_over = state in (RunState.FINISHED, RunState.CANCELLED)
                if is_over or time.monotonic() >= show_at:
                    asked_at = time.monotonic()
                    status = deployment.transact(lambda connection: run_status(connection, run))
                    show(status)
                    if status.is_done or status.has_failed:
                        return status
                    # The more a look costs, the rarer it is.
                    cost_s = time.monotonic() - asked_at
                    show_at = time.monotonic() + max(_REFRESH_S, 10 * cost_s)
                    if deadline is not None and time.monotonic() > deadline:
                        raise WaitTimeout(
                            f"Run {run.slug} was not done after {timeout_s:g} s.",
                            why=" ".join(status.waits),
                            remedy=f"{after_timeout} {run.slug}",
                        )
                check()
                if listener.wait(_REFRESH_S):
                    time.sleep(_THROTTLE_S)
    finally:
        listener.close()


@contextmanager
def _display() -> Iterator[Show]:
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.live import Live

    with Live(console=console(sys.stderr), refresh_per_second=4, transient=True) as live:
        yield lambda status: live.update(_view(status))


class _Lines:
    """A line now and then, for logs."""

    def __init__(self) -> None:
        self._due_at = time.monotonic() + _LINE_EVERY_S

    def show(self, status: RunStatus) -> None:
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + _LINE_EVERY_S
            note(_line(status))


def _line(status: RunStatus) -> str:
    done = status.rollouts["total"] - status.n_open
    return (
        f"{status.elapsed_s:.0f} s: run {status.run} has {done} of {status.rollouts['total']} "
        f"rollouts done ({counts(_but_total(status.rollouts))}), "
        f"reward {number(status.reward_mean)}. {' '.join(status.waits)}".rstrip()
    )


def _view(status: RunStatus) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = status.rollouts["total"]
    done = total - status.n_open
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(status.run, style="bold"),
        ProgressBar(total=max(1, total), completed=done, width=40),
        Text(f"{done}/{total}"),
        Text(f"{done / max(0.001, status.elapsed_s):.0f}/s", style="dim"),
    )
    lines = [
        f"rollouts  {counts(_but_total(status.rollouts))}",
        f"groups    {counts(status.groups)}",
        f"reward    {number(status.reward_mean)} over {status.reward_n}"
        f"   attempts {status.attempts}   workers {status.live_workers}",
        *status.waits,
    ]
    return Group(bar, *(Text(safe_text(line)) for line in lines))


def _but_total(rollouts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in rollouts.items() if name != "total"}
