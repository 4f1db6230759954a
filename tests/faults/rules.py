"""How large the runs under faults are, and what every fault must leave behind."""

from __future__ import annotations

import json

import pytest

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment, Size
from benchmarks.faults.figures import Figures, count_figures
from benchmarks.faults.invariants import find_violations
from benchmarks.faults.runs import FaultRun

#: Small, because each rollout costs processor time on all brokers; `python -m benchmarks faults` is
#: the same with thousands of rollouts.
SIZE = Size(concurrency=12, max_in_flight=30)
#: More running rollouts than one worker holds, of the 24 that two hold.
BOTH = 15
#: Groups of eight with which rollouts wait on the broker and in the store too.
MANY = 6
#: Groups of eight that fill all places of the workers.
FEW = 3

#: A lease or two, a restart, and a machine that is busy with other tests.
PATIENCE_S = 150.0


def judge(run: FaultRun, *, timeout_s: float = PATIENCE_S) -> Figures:
    """Wait until all is done and hold it against the invariants; return the figures."""
    run.wait_terminal(timeout_s=timeout_s)
    evidence = run.evidence()
    figures = count_figures(evidence)
    print(json.dumps(figures.to_json()))
    assert find_violations(evidence) == []
    assert figures.lost == 0
    assert figures.accepted_twice == 0
    return figures


def skip_if_not_applicable(deployment: Deployment, fault: str) -> None:
    """Skip a test whose fault cannot happen to this broker, with the reason."""
    reason = injections.NOT_APPLICABLE[deployment.broker.name].get(fault)
    if reason is not None:
        pytest.skip(f"{fault}: {reason}")


def pids(deployment: Deployment) -> set[int]:
    """Return the pids of workers and controllers."""
    return {member.process.pid for member in (*deployment.workers, *deployment.controllers)}
