"""The command line in folders of its own, and the stand-in for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, servers_of
from fixtures.short_folders import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def bare_rollout(folder: Path) -> Iterator[CommandLine]:
    """Commands with private servers in their folder; everything is stopped afterwards."""
    yield from _command_line(folder)


@pytest.fixture
def rollout(folder: Path, database_url: str, redis_place: BrokerPlace) -> Iterator[CommandLine]:
    """Commands with a database and queues of their own on the servers that all tests share."""
    yield from _command_line(folder, **servers_of(database_url, redis_place))


def _command_line(folder: Path, **environment: str) -> Iterator[CommandLine]:
    command_line = CommandLine(folder, ROLLOUT_WORKER__DRAIN_S="5", **environment)
    yield command_line
    command_line.call("down", "--yes")
    command_line.close()


PolicyStarter = Callable[..., str]


@pytest.fixture
def offline_policy(folder: Path) -> Iterator[PolicyStarter]:
    """Start the stand-in with options; gives its base URL."""
    command_line = CommandLine(folder)

    def start(*options: str) -> str:
        return command_line.start("offline-policy", *options).ready()["base_url"]

    yield start
    command_line.close()
