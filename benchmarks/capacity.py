"""Whether the mock LLM server is fast enough: its cost per call beside the fastest client's.

Run by `python -m benchmarks capacity`. The mock must serve five times what B2 asks for, or B2 would
measure the mock. CPU per call decides, as two busy processes share the cores with other work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from benchmarks.mock_server import ROOT, MockServer
from benchmarks.process_tree import ProcessMeter
from benchmarks.subjects import MOCK, BareLoop
from benchmarks.workloads import WORKLOADS

NEEDED_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Capacity:
    """The mock under the load generator, and B2 on W0."""

    mock_cpu_us_per_call: float
    mock_calls_per_s: float
    client_cpu_us_per_call: float
    client_calls_per_s: float

    @property
    def factor(self) -> float:
        """What one core of the mock serves, over what B2 reached."""
        return 1e6 / self.mock_cpu_us_per_call / self.client_calls_per_s

    @property
    def enough(self) -> bool:
        """Whether the mock is out of the way."""
        return self.factor >= NEEDED_FACTOR

    def to_json(self) -> dict[str, float | bool]:
        """The figures and the verdict."""
        return {**asdict(self), "factor": round(self.factor, 2), "enough": self.enough}


def measure_capacity(*, duration_s: float = 3.0, connections: int = 500) -> Capacity:
    """Load the mock as hard as possible, then let B2 do W0 against it."""
    workload = WORKLOADS["W0"].resized(rollouts=2000)
    command = [sys.executable, "-m", "benchmarks.load_generator"]
    options = ["--connections", str(connections), "--duration-s", str(duration_s)]
    with MockServer() as mock:
        meter = ProcessMeter({MOCK: mock.pid})
        with meter.measuring() as usage:
            done = subprocess.run(
                [*command, "--base-url", mock.base_url, *options],
                stdout=subprocess.PIPE,
                check=True,
                cwd=ROOT,
            )
        load = json.loads(done.stdout)
        client = BareLoop("B2").measure(workload, mock)
    return Capacity(
        mock_cpu_us_per_call=round(1e6 * usage[MOCK].cpu_s / load["calls"], 1),
        mock_calls_per_s=round(load["calls_per_s"]),
        client_cpu_us_per_call=round(1e6 * client.cpu_s / workload.calls, 1),
        client_calls_per_s=round(workload.calls / client.wall_s),
    )
