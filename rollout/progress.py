"""Waits for a run until it is done or has failed; `panel.py` shows the progress.

`run`, `resume`, `watch` and the demo use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from pipeline.contract.errors import WaitTimeout
from pipeline.contract.rollout import RunState
from pipeline.store.engine import READY_CHANNEL, Listener
from pipeline.store.runs import Run
from pipeline.store.status import RunStatus, run_state, run_status
from rollout.deployment import Deployment
from rollout.panel import display

_REFRESH_S = 0.5
#: Shortest time between two queries: notifications come with every commit.
_THROTTLE_S = 0.05


def wait_for_run(
    deployment: Deployment,
    run: Run,
    *,
    check: Callable[[], None] = lambda: None,
    started: Collection[str] = (),
    timeout_s: float | None = None,
    after_timeout: str = "It goes on; follow it: rollout watch",
) -> RunStatus:
    """Wait until a run is done, or paused for its failures; return its status.

    Args:
        deployment: The store.
        run: The run.
        check: Called repeatedly; raises if the wait has become useless.
        started: Kinds of processes that the command started for the run.
        timeout_s: Longest wait; None: no limit.
        after_timeout: End of the timeout's message: the state of the run and the next command.

    Raises:
        WaitTimeout: The time is up; the message has the reasons for the run's wait.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    listener = Listener(deployment.engine, READY_CHANNEL)
    show_at = 0.0
    try:
        with display() as show:
            while True:
                state = deployment.transact(run_state, run)
                is_over = state in (RunState.FINISHED, RunState.CANCELLED)
                if is_over or time.monotonic() >= show_at:
                    queried_at = time.monotonic()
                    status = deployment.transact(run_status, run, started=started)
                    show(status)
                    if status.is_done or status.has_failed:
                        return status
                    # Slow queries are made less often.
                    cost_s = time.monotonic() - queried_at
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
