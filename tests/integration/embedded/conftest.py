"""Private servers in throw-away directories; every test stops and deletes its own.

Making a cluster takes most of the time of a first start, so `services` begins with a copy of one.
The rules about making one, and those about Redis alone, begin with an empty directory.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.command_line import processes_of
from fixtures.short_folders import short_folder

from pipeline.embedded import EmbeddedServices

ServicesAt = Callable[..., EmbeddedServices]


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every account can enter (pytest's own are private to their user)."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def services_at(open_dir: Path) -> Iterator[ServicesAt]:
    """Make services for a directory below `open_dir`, removed with their data after the test."""
    made: list[EmbeddedServices] = []

    def make(data_dir: Path, **options) -> EmbeddedServices:
        made.append(EmbeddedServices(data_dir, **({"durable": False} | options)))
        return made[-1]

    yield make
    for services in made:
        services.remove()
    assert not processes_of(open_dir), "a server outlived its directory"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """The directory of a PostgreSQL that was made, started and stopped."""
    with short_folder() as folder:
        services = EmbeddedServices(folder / "data", durable=False)
        services.start_postgres()
        services.down()
        yield services.status()[0].data_dir
        services.remove()


@pytest.fixture
def services(open_dir: Path, cluster: Path, services_at: ServicesAt) -> EmbeddedServices:
    """Servers that nobody has started yet; PostgreSQL finds its cluster."""
    data_dir = open_dir / "data"
    data_dir.mkdir(mode=0o711)
    # As root, the cluster belongs to another account, which `cp` keeps.
    subprocess.run(["/bin/cp", "-a", cluster, data_dir / "postgres"], check=True)
    return services_at(data_dir)


@pytest.fixture
def new_services(open_dir: Path, services_at: ServicesAt) -> EmbeddedServices:
    """Servers of an empty directory, for tests that need no cluster: its copy takes most time."""
    return services_at(open_dir / "data")
