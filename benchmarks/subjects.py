"""What is measured, behind one interface: a subject does a workload and hands back a measurement.

The bare loops are here; the pipeline's subject implements the same protocol. The bench runs pairs
of them against one mock server. Must not: compare (that is `benchmarks.report`).
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
    """One run of one subject. `usage` has a tree per part; the mock's own is not the subject's."""

    subject: str
    workload: str
    rollouts: int
    finished: int
    wall_s: float
    usage: Mapping[str, TreeUsage]
    seen: Mapping[str, Any] = field(default_factory=dict)
    """What the mock counted, with `expected` set to the workload's rollouts."""

    @property
    def cpu_s(self) -> float:
        """CPU of everything but the mock: broker and database included."""
        return sum(used.cpu_s for name, used in self.usage.items() if name != MOCK)

    @property
    def mock_share(self) -> float:
        """Share of the time for which the mock, which has one thread, was busy."""
        return self.usage[MOCK].cpu_s / self.wall_s

    @property
    def cpu_ms_per_rollout(self) -> float:
        """CPU by rollout asked for."""
        return 1000 * self.cpu_s / self.rollouts

    @property
    def rollouts_per_s(self) -> float:
        """Finished rollouts by wall time."""
        return self.finished / self.wall_s

    @property
    def peak_rss_bytes(self) -> int:
        """Of the largest process that is not the mock, as the kernel kept it."""
        return max(used.peak_process_rss_bytes for n, used in self.usage.items() if n != MOCK)

    def to_json(self) -> dict[str, Any]:
        """The fields and what follows from them."""
        return {
            **asdict(self),
            "cpu_ms_per_rollout": round(self.cpu_ms_per_rollout, 3),
            "rollouts_per_s": round(self.rollouts_per_s, 1),
        }


class Subject(Protocol):
    """A system that can do a workload."""

    name: str

    def measure(self, workload: Workload, mock: MockServer) -> Measurement:
        """Reset the mock, do all rollouts, and say what that took. Start-up is not measured."""
        ...


class BareLoop:
    """B1 or B2 in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def measure(self, workload: Workload, mock: MockServer) -> Measurement:
        """Start a warm loop, let it run the workload, end it."""
        mock.reset(MockBehaviour(turns=workload.behaviour.turns))
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
                process.kill()  # nothing is lost: its result is read, or it has failed

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
