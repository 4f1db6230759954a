"""Deployments for the security suites; what they started is gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.deployment import Deployment
from sqlalchemy import Engine


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
