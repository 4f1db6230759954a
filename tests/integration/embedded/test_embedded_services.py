"""Rules of the private servers while nothing goes wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import kombu
import pytest
from embedded_clients import pid_of, query, redis_client, start_elsewhere

from pipeline.embedded import EmbeddedServices
from pipeline.embedded.services import make_data_dir


def test_ordinary_clients_use_the_postgres_url_as_it_is(services):
    url = services.start_postgres()
    assert url.startswith("postgresql+psycopg://postgres@/rollout?host=/")
    assert query(url, "SELECT current_database(), current_user") == [("rollout", "postgres")]
    assert query(url, "SHOW server_encoding") == [("UTF8",)]
    assert query(url, "SELECT upper('é')") == [("É",)]


def test_kombu_and_redis_py_reach_the_same_redis(new_services):
    broker = new_services.start_redis()
    with kombu.Connection(broker) as connection:
        queue = connection.SimpleQueue("q")
        queue.put({"n": 1})
        queue.close()
    with redis_client(new_services) as client:
        assert client.llen("q") == 1
    with kombu.Connection(broker) as connection:
        queue = connection.SimpleQueue("q")
        message = queue.get(timeout=20)
        message.ack()
        assert message.payload == {"n": 1}
        queue.close()


def test_nothing_listens_on_the_network(services):
    assert query(services.start_postgres(), "SHOW listen_addresses") == [("",)]
    services.start_redis()
    with redis_client(services) as client:
        assert client.config_get("port") == {"port": "0"}


def test_only_its_owner_can_enter_a_servers_directory(services_at, open_dir):
    services = services_at(open_dir / "data")
    services.start_postgres()
    services.start_redis()
    for status in services.status():
        assert status.data_dir.stat().st_mode & 0o077 == 0


def test_starting_again_finds_the_running_servers(services):
    first = (services.start_postgres(), services.start_redis(), services.status())
    assert first == (services.start_postgres(), services.start_redis(), services.status())


def test_servers_outlive_the_process_that_started_them(services_at, open_dir):
    services = services_at(open_dir / "data")
    starter = start_elsewhere(open_dir / "data")
    printed, _ = starter.communicate(timeout=60)
    assert starter.returncode == 0
    assert [status.pid for status in services.status()] == [int(pid) for pid in printed.split()]
    assert query(services.start_postgres(), "SELECT 1") == [(1,)]


def test_processes_that_start_at_once_share_one_pair_of_servers(services_at, open_dir):
    services = services_at(open_dir / "data")
    starters = [start_elsewhere(open_dir / "data") for _ in range(5)]
    printed = {starter.communicate(timeout=60)[0] for starter in starters}
    assert [starter.returncode for starter in starters] == [0] * 5
    assert len(printed) == 1
    assert printed.pop().split() == [str(status.pid) for status in services.status()]


def test_the_data_directory_may_be_made_by_many_at_once(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        for number in range(100):
            made = [
                threads.submit(make_data_dir, tmp_path / f"{number}" / "data") for _ in range(8)
            ]
            assert [each.exception() for each in made] == [None] * 8


def test_down_stops_both_and_up_finds_the_data_again(open_dir, services_at):
    services = services_at(open_dir / "data", durable=True)
    url = services.start_postgres()
    services.start_redis()
    query(url, "CREATE TABLE kept AS SELECT 7 AS n")
    with redis_client(services) as client:
        client.rpush("queue", "message")

    assert services.down() == ["postgres", "redis"]
    assert [(s.pid, s.running) for s in services.status()] == [(None, False)] * 2
    assert services.down() == []

    assert query(services.start_postgres(), "SELECT n FROM kept") == [(7,)]
    services.start_redis()
    with redis_client(services) as client:
        assert client.lrange("queue", 0, -1) == [b"message"]


def test_status_starts_and_creates_nothing(open_dir):
    services = EmbeddedServices(open_dir / "data")
    assert [(s.name, s.running) for s in services.status()] == [
        ("postgres", False),
        ("redis", False),
    ]
    assert services.down() == []
    assert not (open_dir / "data").exists()


def test_a_commit_is_on_disk_unless_the_cluster_is_thrown_away(open_dir, services_at):
    kept = services_at(open_dir / "kept", durable=True)
    assert query(kept.start_postgres(), "SHOW fsync") == [("on",)]
    assert query(kept.start_postgres(), "SHOW synchronous_commit") == [("on",)]
    thrown_away = services_at(open_dir / "thrown")
    assert query(thrown_away.start_postgres(), "SHOW fsync") == [("off",)]


def test_the_callers_postgres_variables_change_nothing(services, monkeypatch):
    for name, value in {"PGPORT": "9", "PGDATA": "/nowhere", "PGDATABASE": "other"}.items():
        monkeypatch.setenv(name, value)
    assert query(services.start_postgres(), "SHOW port") == [("5432",)]


@pytest.mark.parametrize("name", ["d" * 150, "with space, comma", "quo'te\"s ünïcode % # ?"])
def test_any_data_directory_works_however_it_is_named(open_dir, services_at, name):
    services = services_at(open_dir / name)
    assert query(services.start_postgres(), "SELECT 1") == [(1,)]
    broker = services.start_redis()
    with kombu.Connection(broker) as connection:
        connection.ensure_connection(max_retries=1)
    with redis_client(services) as client:
        assert client.ping()
    places = [s.data_dir for s in services.status()]
    services.remove()
    assert not any(place.exists() for place in places)


def test_two_names_of_one_directory_are_one_pair_of_servers(services, open_dir):
    services.start_postgres()
    (open_dir / "link").symlink_to(open_dir / "data")
    linked = EmbeddedServices(open_dir / "link")
    assert linked.start_postgres() == services.start_postgres()
    assert pid_of(linked, "postgres") == pid_of(services, "postgres")
