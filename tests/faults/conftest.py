"""Deployments of their own for the fault suite: one at a time in a test process, made when asked.

A test that leaves work behind takes its deployment with it; the next one gets a new one.
"""

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from fixtures.brokers import missing  # noqa: E402
from fixtures.fork_server import start_module  # noqa: E402
from fixtures.short_folders import servers_place  # noqa: E402

from benchmarks.faults.deployment import Deployment, Size  # noqa: E402
from benchmarks.faults.processes import Started, start_python  # noqa: E402
from benchmarks.faults.servers import BrokerMissing  # noqa: E402
from benchmarks.faults.worker import SKEW_VARIABLE  # noqa: E402
from faults.rules import SIZE  # noqa: E402

BROKERS = ("redis", "rabbitmq", "sqs")

#: Nothing here is slow for want of speed: it waits for leases, restarts and a busy machine.
TIMEOUT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.parent == folder:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def start_process(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Started:
    """Fork controllers, workers and trainers, unless their clock is set before any import."""
    start = start_python if SKEW_VARIABLE in environment else start_module
    return start(module, arguments, environment, log)


def make_deployment(broker: str, size: Size) -> Deployment:
    """Make a deployment whose processes are forks, with servers in memory where there is room."""
    return Deployment(broker, size, start_process=start_process, place=servers_place())


class Deployments:
    """Keeps the deployment of one broker, as long as it is quiet."""

    def __init__(self, broker: str) -> None:
        self._broker = broker
        self._kept: Deployment | None = None

    def get(self) -> Deployment:
        if self._kept is None:
            try:
                self._kept = make_deployment(self._broker, SIZE).__enter__()
            except BrokerMissing as error:
                missing(str(error))
        assert self._kept is not None
        return self._kept

    def drop(self) -> None:
        if self._kept is not None:
            self._kept.__exit__(None, None, None)
            self._kept = None


@pytest.fixture(scope="package", params=BROKERS)
def deployments(request: pytest.FixtureRequest) -> Iterator[Deployments]:
    deployments = Deployments(request.param)
    yield deployments
    deployments.drop()


@pytest.fixture
def deployment(deployments: Deployments) -> Iterator[Deployment]:
    """A restored deployment on each broker in turn: the usual members, nothing under way."""
    deployment = deployments.get()
    deployment.restore()
    yield deployment
    if not deployment.is_quiet():
        deployments.drop()


@pytest.fixture
def seeded() -> random.Random:
    """What is random in a test; `FAULTS_SEED` repeats a failure."""
    seed = int(os.environ.get("FAULTS_SEED", random.randrange(10_000)))
    print(f"FAULTS_SEED={seed}")
    return random.Random(seed)
