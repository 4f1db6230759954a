"""Deployments of controllers and workers, and the stand-in for a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.deployment import SHORT_LEASES, Deployment
from sqlalchemy import Engine

_POLICY = """
import sys
from workers.offline_policy.policy import OfflinePolicyOptions
from workers.offline_policy.server import run_server
run_server(OfflinePolicyOptions(errors=0.1, retry_after_ms=20, seed=7))
"""


@pytest.fixture(scope="module")
def policy_url() -> Iterator[str]:
    """An endpoint that knows sums and refuses every tenth call once, with 429 or 500."""
    process = subprocess.Popen([sys.executable, "-c", _POLICY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["base_url"]
    process.kill()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def deploy(engine: Engine, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Make deployments on a broker; all they started is gone afterwards."""
    made: list[Deployment] = []

    def make(place: BrokerPlace, **sections: dict[str, Any]) -> Deployment:
        made.append(Deployment(engine, place, tmp_path, **sections))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


@pytest.fixture
def hasty(deploy: Callable[..., Deployment], broker_place: BrokerPlace) -> Deployment:
    """A deployment on each broker in turn, where silence soon means death."""
    return deploy(broker_place, **SHORT_LEASES)


@pytest.fixture
def deployment(deploy: Callable[..., Deployment], broker_place: BrokerPlace) -> Deployment:
    """A deployment on each broker in turn."""
    return deploy(broker_place)
