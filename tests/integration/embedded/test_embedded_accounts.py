"""Rules of the private servers for root and for an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from embedded_clients import pid_of, query, redis_client

from pipeline.embedded import postgres_programs
from pipeline.embedded.server_paths import ROOT_ACCOUNTS

ROOT = Path(__file__).parents[3]
PACKAGES = [path for path in sys.path if path.endswith("site-packages")]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as somebody else")

#: The whole life of both servers, as a process of an ordinary user.
LIFE = """
import os, socket, sys
from pathlib import Path
import sqlalchemy as sa
from pipeline.embedded import EmbeddedServices
assert os.geteuid() != 0
services = EmbeddedServices(Path(sys.argv[1]), durable=False)
url = services.start_postgres()
services.start_redis()
with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
    print(connection.execute(sa.text("SELECT 40 + 2")).scalar_one())
with socket.socket(socket.AF_UNIX) as client:
    client.connect(services.redis_client_url.removeprefix("unix://").partition("?")[0])
    client.sendall(b"PING\\r\\n")
    print(client.recv(10) == b"+PONG\\r\\n")
print(*(os.stat(f"/proc/{status.pid}").st_uid == os.geteuid() for status in services.status()))
services.start_postgres(), services.start_redis()
print(*services.down())
services.remove()
"""


def run_as_nobody(python: str, script: str, *arguments: object) -> subprocess.CompletedProcess:
    nobody = pwd.getpwnam("nobody")
    return subprocess.run(
        [python, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join([str(ROOT), *PACKAGES])},
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
    )


@pytest.fixture(scope="module")
def nobodys_python() -> str:
    """A Python of this version that an ordinary user can run with our packages."""
    if os.geteuid() != 0:
        pytest.skip("only root can run as somebody else")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        with contextlib.suppress(OSError):
            probe = "import pipeline.embedded, psycopg, sqlalchemy"
            if run_as_nobody(python, probe).returncode == 0:
                return python
    pytest.skip("no Python here that an ordinary user can run with these packages")


def test_an_ordinary_user_runs_both_servers_below_his_directory(open_dir, nobodys_python):
    (open_dir / "his").mkdir()
    nobody = pwd.getpwnam("nobody")
    os.chown(open_dir / "his", nobody.pw_uid, nobody.pw_gid)

    done = run_as_nobody(nobodys_python, LIFE, open_dir / "his" / "data")

    assert done.stderr == ""
    assert done.stdout.split() == ["42", "True", "True", "True", "postgres", "redis"]
    assert sorted(path.name for path in (open_dir / "his" / "data").iterdir()) == ["services.lock"]


def test_an_ordinary_user_is_refused_on_the_directory_of_another(
    services, open_dir, nobodys_python
):
    services.start_redis()
    services.start_postgres()
    pids = [status.pid for status in services.status()]
    done = run_as_nobody(nobodys_python, LIFE, open_dir / "data")
    assert "ServiceUnavailable: The data directory" in done.stderr
    assert [status.pid for status in services.status()] == pids


@as_root
def test_roots_postgres_runs_as_another_account_in_the_data_directory(services_at, open_dir):
    services = services_at(open_dir / "data")
    services.start_postgres()
    owner = pwd.getpwuid(os.stat(f"/proc/{pid_of(services, 'postgres')}").st_uid)
    assert owner.pw_name in ROOT_ACCOUNTS
    assert services.status()[0].data_dir == open_dir / "data" / "postgres"


@as_root
def test_a_data_directory_out_of_that_accounts_reach_stays_closed(open_dir, services_at):
    private = open_dir / "private"
    private.mkdir(mode=0o700)
    services = services_at(private / "data")

    url = services.start_postgres()
    query(url, "CREATE TABLE kept AS SELECT 7 AS n")
    services.down()

    home = services.status()[0].data_dir
    assert private not in home.parents
    assert home.stat().st_mode & 0o777 == 0o700
    assert private.stat().st_mode & 0o777 == 0o700
    noted = json.loads((private / "data" / "services.json").read_text())
    assert noted["postgres_home"] == str(home)
    assert services.start_postgres() == url
    assert query(url, "SELECT n FROM kept") == [(7,)]
    services.remove()
    assert not home.exists()


@as_root
def test_a_moved_data_directory_keeps_its_cluster_and_a_copied_one_gets_its_own(
    open_dir, services_at
):
    private = open_dir / "private"
    private.mkdir(mode=0o700)
    original = services_at(private / "data")
    query(original.start_postgres(), "CREATE TABLE kept AS SELECT 7 AS n")
    original.down()

    shutil.copytree(private / "data", private / "copy")
    copy = services_at(private / "copy")
    assert query(copy.start_postgres(), "SELECT to_regclass('kept')") == [(None,)]

    (private / "data").rename(private / "moved")
    moved = services_at(private / "moved")
    assert query(moved.start_postgres(), "SELECT n FROM kept") == [(7,)]
    assert pid_of(moved, "postgres") != pid_of(copy, "postgres")


@as_root
def test_programs_out_of_that_accounts_reach_are_copied_for_it(services, open_dir, monkeypatch):
    (installed,) = [root for root in postgres_programs.installations() if root.name.endswith("18")]
    hidden = open_dir / "hidden"
    shutil.copytree(installed, hidden / "site" / postgres_programs.WHEEL / "pg", symlinks=True)
    libraries = installed.parent.with_name(f"{postgres_programs.WHEEL}.libs")
    shutil.copytree(libraries, hidden / "site" / libraries.name)
    hidden.chmod(0o700)
    monkeypatch.setattr(
        postgres_programs,
        "installations",
        lambda: [hidden / "site" / postgres_programs.WHEEL / "pg"],
    )

    assert query(services.start_postgres(), "SELECT 1") == [(1,)]
    services.down()
    home = services.status()[0].data_dir
    assert len(list(home.glob("programs*"))) == 1
    assert query(services.start_postgres(), "SELECT 1") == [(1,)]


def test_a_servers_sockets_follow_a_moved_data_directory(open_dir, services_at):
    services = services_at(open_dir / "data")
    services.start_redis()
    with redis_client(services) as client:
        client.set("key", "value")
    (open_dir / "data").rename(open_dir / "moved")
    moved = services_at(open_dir / "moved")
    moved.start_redis()
    with redis_client(moved) as client:
        assert client.get("key") == b"value"
