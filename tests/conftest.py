"""Fixtures of all suites: private servers, a database of its own per test, every broker.

The environment of whoever runs the tests is none of their business: it is cleared here.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import (
    AMQP_VARIABLE,
    BROKER_KINDS,
    BrokerPlace,
    amqp_vhost,
    delete_queues,
    moto_server,
)
from fixtures.order import order_for
from fixtures.progress import register_progress
from fixtures.servers import PrivateServers
from fixtures.shared import processor
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from sqlalchemy import Engine

from pipeline.queue.broker import Broker, broker_of
from pipeline.settings import Settings, load_settings
from pipeline.store.engine import open_engine
from workers.sandbox.kinds import choose_local

_FOREIGN = ("ROLLOUT_", "OPENAI_", "ANTHROPIC_", "AWS_", "BASE_URL", "MODEL_ID")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that wait: the others need the processors meanwhile."""
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = order_for(items, processes)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect in as many processes as run at once; the others find what these have compiled."""
    if (name := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return (yield)
    with processor(Path(session.config.option.basetemp).parent, int(name.removeprefix("gw"))):
        return (yield)


def pytest_collection_finish() -> None:
    """Spare each garbage collection the modules and tests, which stay until the end."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collect what the tests left once, and spare the remaining collections the rest."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    register_progress(config)
    if url := os.environ.get("ROLLOUT_TEST_AMQP_URL"):
        os.environ[AMQP_VARIABLE] = url
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            del os.environ[name]
    # Without compiled files each of the hundreds of processes would compile all that it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # boto3 wants some credentials; these open no account.
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "testing"
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So it is for what a script runs in the background, and for all that we start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line(
        "markers", "hostile: runs commands that attack; without namespaces only where harmless"
    )
    # Folders of earlier runs, removed by two at once.
    config.addinivalue_line("filterwarnings", r"ignore:\(rm_rf\):pytest.PytestWarning")
    # Of the AgentCore SDK's own classes.
    config.addinivalue_line(
        "filterwarnings", "ignore:Support for class-based `config`:DeprecationWarning"
    )
    # The same examples for everybody, and no clock: a busy machine is no failure.
    hypothesis_settings.register_profile(
        "suite",
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    hypothesis_settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def canary() -> Iterator[None]:
    """Prove that no test ends processes which it did not start: one of the same user lives on."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    yield
    ended = process.poll()
    process.communicate()
    assert ended is None, f"a test ended a process that it did not start (returned {ended})"


@pytest.fixture
def some_sandbox() -> None:
    """For tests of well-behaved commands: skipped where even those are refused."""
    choice = choose_local()
    if choice.kind is None:
        pytest.skip(f"no sandbox runs here: {choice.obstacles}")


@pytest.fixture(scope="session")
def servers() -> Iterator[PrivateServers]:
    """PostgreSQL and Redis of this test process."""
    servers = PrivateServers()
    yield servers
    servers.remove()


@pytest.fixture
def database_url(servers: PrivateServers) -> Iterator[str]:
    """A migrated, empty database that no other test sees."""
    url = servers.lend_database()
    yield url
    servers.take_back(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = open_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def redis_url(servers: PrivateServers) -> str:
    return servers.redis_url()


@pytest.fixture(scope="session")
def amqp_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.getbasetemp()
    # xdist's processes have folders of their own in that of the test run.
    run = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with amqp_vhost(run / "rabbitmq") as url:
        yield url


@pytest.fixture(scope="session")
def aws_url() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def redis_place(redis_url: str) -> BrokerPlace:
    return BrokerPlace("redis", redis_url)


@pytest.fixture
def amqp_place(amqp_url: str) -> Iterator[BrokerPlace]:
    place = BrokerPlace("amqp", amqp_url)
    yield place
    delete_queues(place)


@pytest.fixture
def sqs_place(aws_url: str) -> BrokerPlace:
    return BrokerPlace("sqs", "sqs://testing:testing@", {"endpoint_url": aws_url})


@pytest.fixture(params=BROKER_KINDS)
def broker_place(request: pytest.FixtureRequest) -> BrokerPlace:
    """Each broker in turn, with queues of its own for this test."""
    return request.getfixturevalue(f"{request.param}_place")


SettingsMaker = Callable[..., Settings]


@pytest.fixture
def make_settings(tmp_path: Path) -> SettingsMaker:
    """Make settings for a broker place; sections given as keywords are laid over it."""

    def make(place: BrokerPlace | None = None, **sections: Any) -> Settings:
        overrides: dict[str, Any] = {"data_dir": tmp_path / "data"}
        for layer in (place.overrides() if place else {}, sections):
            for name, value in layer.items():
                overrides[name] = {**overrides.get(name, {}), **value}
        return load_settings(overrides=overrides, start=tmp_path)

    return make


@pytest.fixture
def broker(broker_place: BrokerPlace, make_settings: SettingsMaker) -> Broker:
    """Each broker in turn, as the code sees it."""
    return broker_of(make_settings(broker_place))
