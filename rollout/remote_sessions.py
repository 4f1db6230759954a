"""The end of a run's remote sessions: `rollout run` returns when none of them is left.

Used by `local_run.py`. Must not: stop a session itself, the controller does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.agentcore.call_pace import require_shared_pace
from pipeline.settings import Settings
from pipeline.store.remote_sessions import count_sessions
from pipeline.store.runs import Run
from rollout.deployment import Deployment
from rollout.output import note

#: Longest wait: a thousand sessions are stopped in forty seconds at 25 calls per second.
_LONGEST_S = 120.0
_POLL_S = 0.2


def require_shared_pace_here(settings: Settings) -> None:
    """Check that processes of this command can share the pace of calls.

    Raises:
        ConfigError: The broker is no Redis, and no other Redis is set.
    """
    if not settings.embedded_broker:
        require_shared_pace(settings)


def wait_for_sessions(deployment: Deployment, run: Run, *, check: Callable[[], None]) -> None:
    """Wait until the controller has stopped the run's sessions; print a note if some remain."""
    deadline = time.monotonic() + _LONGEST_S
    while left := deployment.transact(count_sessions, run.run_id):
        if time.monotonic() > deadline:
            note(
                f"{left} remote sessions were not stopped within {_LONGEST_S:g} s. A controller "
                "stops them later: rollout controller. AgentCore ends idle sessions by itself."
            )
            return
        check()
        time.sleep(_POLL_S)
