"""Rules of the private servers after crashes: nothing left behind blocks the next start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from embedded_clients import pid_of, query, redis_client, start_elsewhere

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded import EmbeddedServices
from pipeline.embedded.processes import process_exists


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process_exists(pid))


def wait_until(true: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def bystander() -> Iterator[int]:
    """A live process of somebody else."""
    process = subprocess.Popen(["sleep", "300"])
    yield process.pid
    assert process.poll() is None, "a foreign process was killed"
    process.kill()
    process.wait()


def test_a_killed_postgres_starts_again_with_all_that_was_committed(open_dir, services_at):
    services = services_at(open_dir / "data", durable=True)
    query(services.start_postgres(), "CREATE TABLE kept AS SELECT 7 AS n")
    kill_and_wait(pid_of(services, "postgres"))
    assert services.status()[0].running is False
    assert query(services.start_postgres(), "SELECT n FROM kept") == [(7,)]


def test_a_killed_postgres_starts_again_while_a_client_still_holds_on(services):
    url = services.start_postgres()
    with contextlib.closing(psycopg.connect(url.replace("+psycopg", ""))) as client:
        client.execute("CREATE TEMP TABLE t AS SELECT 1")
        kill_and_wait(pid_of(services, "postgres"))
        assert query(services.start_postgres(), "SELECT 1") == [(1,)]


def test_a_killed_redis_starts_again_with_its_queues(open_dir, services_at):
    services = services_at(open_dir / "data", durable=True)
    services.start_redis()
    with redis_client(services) as client:
        client.rpush("queue", *range(1000))
    kill_and_wait(pid_of(services, "redis"))
    services.start_redis()
    with redis_client(services) as client:
        assert client.llen("queue") == 1000


def test_a_starter_killed_at_any_moment_blocks_nobody(services_at, open_dir):
    services = services_at(open_dir / "data")
    for moment_s in (0.1, 0.2, 0.3, 0.4, 0.5):
        starter = start_elsewhere(open_dir / "data")
        time.sleep(moment_s)  # the point is to hit whatever is going on just then
        starter.kill()
        starter.communicate()
    assert query(services.start_postgres(), "SELECT 1") == [(1,)]
    services.start_redis()
    with redis_client(services) as client:
        assert client.ping()
    home = services.status()[0].data_dir
    assert sorted(path.name for path in home.glob("data*")) == ["data"]


def test_a_reboot_that_gave_our_pids_to_others_harms_neither(open_dir, services_at, bystander):
    services = services_at(open_dir / "data", durable=True)
    query(services.start_postgres(), "CREATE TABLE kept AS SELECT 7 AS n")
    services.start_redis()
    pids = [status.pid for status in services.status()]
    homes = [status.data_dir for status in services.status()]
    for pid in pids:
        kill_and_wait(pid)
    pid_file = homes[0] / "data" / "postmaster.pid"
    old = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(bystander), *old[1:]]) + "\n")
    socket_lock = homes[0] / ".s.PGSQL.5432.lock"
    socket_lock.write_text(socket_lock.read_text().replace(old[0], str(bystander)))
    (homes[1] / "redis.pid").write_text(f"{bystander}\n")

    assert [status.running for status in services.status()] == [False, False]
    assert services.down() == []
    assert query(services.start_postgres(), "SELECT n FROM kept") == [(7,)]
    services.start_redis()
    assert bystander not in [status.pid for status in services.status()]


@pytest.mark.parametrize("junk", ["", "junk\n", "-5\n", "1\n", "99999999\n", "0\n"])
def test_a_pid_file_of_nonsense_blocks_nothing(new_services, junk):
    new_services.start_redis()
    new_services.down()
    homes = [status.data_dir for status in new_services.status()]
    (homes[1] / "redis.pid").write_text(junk)
    new_services.start_redis()
    with redis_client(new_services) as client:
        assert client.ping()


def test_a_server_whose_pid_file_is_lost_is_never_doubled(new_services, open_dir, services_at):
    new_services.start_redis()
    pid = pid_of(new_services, "redis")
    (new_services.status()[1].data_dir / "redis.pid").unlink()
    hasty = services_at(open_dir / "data", start_timeout_s=0.3)
    with pytest.raises(ServiceUnavailable, match="earlier server still run") as caught:
        hasty.start_redis()
    assert caught.value.code == "E212"
    kill_and_wait(pid)
    new_services.start_redis()


@pytest.mark.parametrize("name", ["postgres", "redis"])
def test_a_server_whose_socket_was_cleaned_away_is_started_anew(services, name):
    start = {"postgres": services.start_postgres, "redis": services.start_redis}[name]
    start()
    first = pid_of(services, name)
    home = next(s.data_dir for s in services.status() if s.name == name)
    socket = home / {"postgres": ".s.PGSQL.5432", "redis": "redis.sock"}[name]
    socket.unlink()
    start()
    assert socket.exists()
    assert pid_of(services, name) != first
    assert not process_exists(first)


def test_a_paused_server_is_reported_and_left_alone(new_services, open_dir, services_at):
    new_services.start_redis()
    pid = pid_of(new_services, "redis")
    hasty = services_at(open_dir / "data", start_timeout_s=0.3)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ServiceUnavailable, match=rf"Process {pid} .*stopped") as caught:
        hasty.start_redis()
    os.kill(pid, signal.SIGCONT)
    assert caught.value.code == "E212"
    new_services.start_redis()
    assert pid_of(new_services, "redis") == pid


def test_down_stops_a_paused_server_too(services):
    services.start_redis()
    services.start_postgres()
    pids = [status.pid for status in services.status()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert services.down() == ["postgres", "redis"]
    assert not any(process_exists(pid) for pid in pids)


def test_a_damaged_append_only_file_is_set_aside(open_dir, services_at):
    services = services_at(open_dir / "data", durable=True)
    services.start_redis()
    home = services.status()[1].data_dir
    services.down()
    for path in home.rglob("appendonly.aof*.aof"):
        path.write_bytes(b"*1\r\n$4\r\nPING\r\n" + b"garbage " * 100)
    services.start_redis()
    with redis_client(services) as client:
        assert client.ping()
    (damaged,) = home.glob("damaged-*")
    # Redis 6 has one file, later versions have a folder of them.
    kept = damaged.glob("*.aof") if damaged.is_dir() else [damaged]
    assert {path.read_bytes()[-8:] for path in kept} == {b"garbage "}


def test_a_start_that_fails_shows_the_end_of_the_log(services):
    services.start_postgres()
    services.down()
    home = services.status()[0].data_dir
    with (home / "data" / "postgresql.conf").open("a") as config:
        config.write("no_such_setting = 1\n")
    with pytest.raises(ServiceUnavailable, match="no_such_setting") as caught:
        services.start_postgres()
    assert caught.value.code == "E211"
    assert str(home / "postgres.log") in caught.value.remedy


def test_a_cluster_of_another_major_version_is_not_touched(services):
    services.start_postgres()
    services.down()
    version = services.status()[0].data_dir / "data" / "PG_VERSION"
    version.write_text("12\n")
    with pytest.raises(ServiceUnavailable, match=r"made by PostgreSQL 12, .*Installed: ") as caught:
        services.start_postgres()
    assert caught.value.code == "E211"
    version.unlink()
    with pytest.raises(ServiceUnavailable, match="is not a PostgreSQL cluster"):
        services.start_postgres()


def test_waiting_for_another_starter_ends_and_says_so(open_dir, services_at):
    hold = (
        "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        "fcntl.flock(fd, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    lock = open_dir / "services.lock"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(ServiceUnavailable, match=r"Another process .*0\.2 s") as caught:
            services_at(open_dir, start_timeout_s=0.2).start_redis()
    finally:
        holder.kill()
        holder.communicate()
    assert caught.value.code == "E212"


@pytest.mark.parametrize("service", ["postgres", "redis"])
def test_without_the_wheels_the_remedy_is_named(new_services, monkeypatch, service):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    start = {"postgres": new_services.start_postgres, "redis": new_services.start_redis}[service]
    with pytest.raises(ServiceUnavailable, match=r"rollout-pipeline\[embedded\]") as caught:
        start()
    assert caught.value.code == "E210"
    assert "ROLLOUT_" in caught.value.remedy


def test_a_big_log_is_put_aside_at_the_next_start(new_services, monkeypatch):
    monkeypatch.setattr("pipeline.embedded.processes.LOG_BYTES", 10)
    new_services.start_redis()
    new_services.down()
    new_services.start_redis()
    log: Path = new_services.status()[1].log
    assert log.with_name("redis.log.1").read_text().lower().count("ready to accept") == 1
    assert log.read_text().lower().count("ready to accept") == 1


def test_a_data_directory_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceUnavailable, match="cannot be used") as caught:
        EmbeddedServices(tmp_path / "file" / "data").start_redis()
    assert caught.value.code == "E213"
