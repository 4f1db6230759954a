"""Ordinary clients of the private servers, and a process that starts them and exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import redis
import sqlalchemy as sa

from pipeline.embedded import EmbeddedServices

ROOT = Path(__file__).parents[3]

#: A process of its own that starts both servers, says their pids, and exits.
STARTER = """
import sys
from pathlib import Path
from pipeline.embedded import EmbeddedServices
services = EmbeddedServices(Path(sys.argv[1]), durable=False)
services.start_postgres()
services.start_redis()
print(*(status.pid for status in services.status()))
"""


def start_elsewhere(data_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(data_dir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def query(url: str, statement: str) -> list[tuple]:
    """Run one statement as any client would, committed."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        result = connection.execute(sa.text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []


def redis_client(services: EmbeddedServices) -> redis.Redis:
    return redis.Redis.from_url(services.redis_client_url, single_connection_client=True)


def pid_of(services: EmbeddedServices, name: str) -> int:
    (found,) = (status for status in services.status() if status.name == name)
    assert found.pid is not None
    return found.pid
