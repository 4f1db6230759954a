"""Servers that are only borrowed stop with the last borrower; those that are to stay do not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from embedded_clients import ROOT, query

from pipeline.embedded import EmbeddedServices

#: Borrows, says so, and ends when its stdin does.
BORROWER = """
import sys
from pathlib import Path
from pipeline.embedded import EmbeddedServices
services = EmbeddedServices(Path(sys.argv[1]), durable=False)
with services.borrow_postgres() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""

#: Borrows again and again; each time the server must answer, at the beginning and at the end.
REPEATER = """
import sys
from pathlib import Path
import sqlalchemy as sa
from pipeline.embedded import EmbeddedServices
services = EmbeddedServices(Path(sys.argv[1]), durable=False)
for _ in range(4):
    with services.borrow_postgres() as server:
        engine = sa.create_engine(server.url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            for _ in range(20):
                connection.execute(sa.text("SELECT pg_sleep(0.005)"))
        with engine.connect() as connection:
            connection.execute(sa.text("SELECT 1"))
"""


def started(program: str, data_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(data_dir)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def borrower(data_dir: Path) -> subprocess.Popen[str]:
    process = started(BORROWER, data_dir)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("postgresql")
    return process


def running(services: EmbeddedServices) -> list[str]:
    return [status.name for status in services.status() if status.running]


def test_a_borrowed_server_stops_and_keeps_its_data(services: EmbeddedServices):
    with services.borrow_postgres() as server:
        assert server.is_temporary
        query(server.url, "CREATE TABLE kept AS SELECT 7 AS n")
    with services.borrow_redis():
        assert running(services) == ["redis"]
    assert running(services) == []
    with services.borrow_postgres() as server:
        assert query(server.url, "SELECT n FROM kept") == [(7,)]


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_the_last_of_two_borrowers_stops_it(
    services: EmbeddedServices, open_dir: Path, first_to_go: int
):
    both = [borrower(open_dir / "data"), borrower(open_dir / "data")]
    both[first_to_go].communicate()
    assert running(services) == ["postgres"]
    both[1 - first_to_go].communicate()
    assert running(services) == []


def test_a_server_that_is_to_stay_is_not_stopped(services: EmbeddedServices):
    url = services.start_postgres()
    with services.borrow_postgres() as server:
        assert server == (url, False)
    assert query(url, "SELECT 1") == [(1,)]


def test_one_that_is_started_to_stay_meanwhile_stays(services: EmbeddedServices, open_dir: Path):
    reader = borrower(open_dir / "data")
    url = services.start_postgres()
    reader.communicate()
    assert query(url, "SELECT 1") == [(1,)]
    with services.borrow_postgres() as server:
        assert not server.is_temporary


def test_what_a_killed_borrower_left_stops_with_the_next(
    services: EmbeddedServices, open_dir: Path
):
    killed = borrower(open_dir / "data")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert running(services) == ["postgres"]
    with services.borrow_postgres() as server:
        assert server.is_temporary
    assert running(services) == []


def test_down_stops_a_borrowed_server_and_leaves_no_note(
    services: EmbeddedServices, open_dir: Path
):
    reader = borrower(open_dir / "data")
    assert services.down() == ["postgres"]
    url = services.start_postgres()
    reader.communicate()
    assert query(url, "SELECT 1") == [(1,)]
    assert not list((open_dir / "data").glob("*.borrowed"))


def test_finding_starts_nothing_and_lets_a_running_server_stay(
    services_at: Callable[..., EmbeddedServices], open_dir: Path
):
    services = services_at(open_dir / "data")
    assert services.find_postgres() is None
    assert not (open_dir / "data").exists()
    reader = borrower(open_dir / "data")
    url = services.find_postgres()
    reader.communicate()
    assert url is not None
    assert query(url, "SELECT 1") == [(1,)]
    services.down()
    assert services.find_postgres() is None
    assert running(services) == []


def test_borrowers_that_come_and_go_never_lose_the_server(
    services_at: Callable[..., EmbeddedServices], open_dir: Path
):
    services = services_at(open_dir / "data")
    repeaters = [started(REPEATER, open_dir / "data") for _ in range(3)]
    for repeater in repeaters:
        repeater.communicate()
    assert [repeater.returncode for repeater in repeaters] == [0, 0, 0]
    assert running(services) == []
