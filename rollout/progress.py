"""Waiting for a run, until it is done or has failed; `panel.py` shows it meanwhile.

Used by `run`, `resume`, `watch` and the demo.
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
#: Notifications come with every commit; looking at each would be work for nothing.
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
    """Wait until a run is done, or paused for its failures; return its figures then.

    Args:
        deployment: The store.
        run: What to wait for.
        check: Called again and again; raises where waiting is of no use any more.
        started: Kinds of processes that the command started for the run.
        timeout_s: Longest wait; None: for ever.
        after_timeout: What becomes of the run then, and the command to go on with.

    Raises:
        WaitTimeout: The time is up; says what the run waits for.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    listener = Listener(deployment.engine, READY_CHANNEL)
    show_at = 0.0
    try:
        with display() as show:
            while True:
                state = deployment.transact(lambda connection: run_state(connection, run))
                is_over = state in (RunState.FINISHED, RunState.CANCELLED)
                if is_over or time.monotonic() >= show_at:
                    asked_at = time.monotonic()
                    status = deployment.transact(
                        lambda connection: run_status(connection, run, started=started)
                    )
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
