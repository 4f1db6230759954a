"""A store for the tests; `make test-inspect` runs them without the suite's own fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.servers import PrivateServers
from sqlalchemy import Engine

from pipeline.store.engine import open_engine


@pytest.fixture(scope="session")
def servers() -> Iterator[PrivateServers]:
    servers = PrivateServers()
    yield servers
    servers.remove()


@pytest.fixture
def engine(servers: PrivateServers) -> Iterator[Engine]:
    url = servers.lend_database()
    engine = open_engine(url)
    yield engine
    engine.dispose()
    servers.take_back(url)
