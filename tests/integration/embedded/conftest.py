"""Private servers in throw-away directories; every test stops and deletes its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.embedded import EmbeddedServices

ServicesAt = Callable[..., EmbeddedServices]


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every account can enter (pytest's own are private to their user)."""
    with tempfile.TemporaryDirectory(prefix="rt-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def services_at() -> Iterator[ServicesAt]:
    """Make services for a directory, removed with their data after the test."""
    made: list[EmbeddedServices] = []

    def make(data_dir: Path, **options) -> EmbeddedServices:
        made.append(EmbeddedServices(data_dir, **({"durable": False} | options)))
        return made[-1]

    yield make
    for services in made:
        services.remove()


@pytest.fixture
def services(open_dir: Path, services_at: ServicesAt) -> EmbeddedServices:
    return services_at(open_dir / "data")
