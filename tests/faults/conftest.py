"""Deployments of their own for the fault suite: one per broker and test process, made when asked.

A test that leaves work behind takes its deployment with it; the next one gets a new one.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from fixtures.brokers import missing  # noqa: E402

from benchmarks.faults.deployment import Deployment  # noqa: E402
from benchmarks.faults.servers import BrokerMissing  # noqa: E402

BROKERS = ("redis", "rabbitmq")


class Deployments:
    """Keeps one deployment of each broker, as long as it is quiet."""

    def __init__(self) -> None:
        self._kept: dict[str, Deployment] = {}

    def get(self, broker: str) -> Deployment:
        if broker not in self._kept:
            try:
                self._kept[broker] = Deployment(broker).__enter__()
            except BrokerMissing as error:
                missing(str(error))
        return self._kept[broker]

    def drop(self, *brokers: str) -> None:
        for broker in brokers or tuple(self._kept):
            self._kept.pop(broker).__exit__(None, None, None)


@pytest.fixture(scope="session")
def deployments() -> Iterator[Deployments]:
    deployments = Deployments()
    yield deployments
    deployments.drop()


@pytest.fixture(scope="session", params=BROKERS)
def broker_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def deployment(deployments: Deployments, broker_name: str) -> Iterator[Deployment]:
    """A calm deployment on each broker in turn: the usual members, nothing under way."""
    deployment = deployments.get(broker_name)
    deployment.calm()
    yield deployment
    if not deployment.is_quiet():
        deployments.drop(broker_name)


@pytest.fixture
def seeded() -> random.Random:
    """What is random in a test; `FAULTS_SEED` repeats a failure."""
    seed = int(os.environ.get("FAULTS_SEED", random.randrange(10_000)))
    print(f"FAULTS_SEED={seed}")
    return random.Random(seed)
