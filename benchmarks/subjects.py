"""The interface of measured systems: a subject runs a workload and returns a measurement.

The bare loops are here; the pipeline's subject implements the same protocol. The bench runs pairs
of them against one mock server. Must not: compare (`benchmarks.report` does).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Protocol

from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_server import ROOT, MockServer
from benchmarks.process_tree import ProcessMeter, TreeUsage
from benchmarks.workloads import Workload

MOCK = "mock"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one subject. `usage` has a tree per part, including the mock."""

    subject: str
    workload: str
    rollouts: int
    finished: int
    wall_s: float
    usage: Mapping[str, TreeUsage]
    seen: Mapping[str, Any] = field(default_factory=dict)
    """The mock's counts, with `expected` set to the workload's rollouts."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all parts except the mock, including broker and database."""
        return sum(used.cpu_s for name, used in self.usage.items() if name != MOCK)

    @property
    def mock_share(self) -> float:
        """Share of the time in which the mock's only thread was busy."""
        return self.usage[MOCK].cpu_s / self.wall_s

    @property
    def cpu_ms_per_rollout(self) -> float:
        """CPU per requested rollout."""
        return 1000 * self.cpu_s / self.rollouts

    @property
    def rollouts_per_s(self) -> float:
        """Finished rollouts per second of wall time."""
        return self.finished / self.wall_s

    @property
    def peak_rss_bytes(self) -> int:
        """Peak memory of the largest process except the mock, as counted by the kernel."""
        return max(used.peak_process_rss_bytes for n, used in self.usage.items() if n != MOCK)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the figures computed from them."""
        return {
            **asdict(self),
            "cpu_ms_per_rollout": round(self.cpu_ms_per_rollout, 3),
            "rollouts_per_s": round(self.rollouts_per_s, 1),
        }


class Subject(Protocol):
    """A system that can run a workload."""

    name: str

    def measure(self, workload: Workload, mock: MockServer) -> Measurement:
        """Reset the mock, run all rollouts, and return the measurement, without the start-up."""
        ...


class BareLoop:
    """B1, B2 or B3 in its own process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def measure(self, workload: Workload, mock: MockServer) -> Measurement:
        """Start a loop, warm it up, let it run the workload, end it."""
        behaviour = workload.behaviour
        mock.reset(MockBehaviour(turns=behaviour.turns, context_tokens=behaviour.context_tokens))
        options = {
            "--base-url": mock.base_url,
            "--rollouts": str(workload.rollouts),
            "--in-flight": str(workload.in_flight),
        }
        command = [sys.executable, "-m", "benchmarks.bare_loop", self.name, workload.name, "--wait"]
        process = subprocess.Popen(
            [*command, *(word for option in options.items() for word in option)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        with process:
            try:
                return self._run(process, workload, mock)
            finally:
                process.kill()  # loses nothing: its result is read, or it has failed

    def _run(
        self, process: subprocess.Popen[str], workload: Workload, mock: MockServer
    ) -> Measurement:
        assert process.stdin is not None
        self._read(process)
        mock.reset(workload.behaviour)
        meter = ProcessMeter({self.name: process.pid, MOCK: mock.pid})
        with meter.measuring() as usage:
            started = monotonic()
            process.stdin.write("start\n")
            process.stdin.flush()
            result = self._read(process)
            wall_s = monotonic() - started
        seen = mock.stats(expected=workload.rollouts)
        return Measurement(
            subject=self.name,
            workload=workload.name,
            rollouts=workload.rollouts,
            finished=result["finished"] - result["wrong"],
            wall_s=wall_s,
            usage=usage,
            seen=seen,
        )

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {process.wait()} before its result")
        return json.loads(line)
