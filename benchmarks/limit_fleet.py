"""Worker processes that share limits through a private Redis, and the times of their calls.

`limits.py` and the tests of limits use it. Must not judge the results.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from benchmarks.limit_callers import ENDPOINT, MODEL
from benchmarks.mock_server import ROOT
from pipeline.limits.settings import LimitSettings
from pipeline.limits.store import LimitStore


class PrivateRedis:
    """A Redis server on its own unix socket; tests may kill it."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.socket = folder / "r.sock"
        self.url = f"unix://{self.socket}"
        self.pid = 0

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [str(self.program), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        command += ["--dir", str(self.folder), "--logfile", str(self.folder / "log")]
        self.pid = os.posix_spawn(self.program, command, os.environ)
        client = Redis.from_url(self.url)
        for _ in range(500):
            with contextlib.suppress(RedisConnectionError):
                assert client.info("server")["process_id"] == self.pid
                client.close()
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.program} did not start: {(self.folder / 'log').read_text()}")

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.socket.unlink(missing_ok=True)


@dataclass
class Report:
    """The calls of a fleet: (granted_at, ended_at, run, tokens)."""

    grants: list[tuple[float, float, str, int]] = field(default_factory=list)
    calls: int = 0
    by_process: list[int] = field(default_factory=list)

    def between(self, since: float, until: float, run: str = "") -> int:
        """Count the grants in a window, of one run or of all."""
        return sum(since <= g[0] < until and run in ("", g[2]) for g in self.grants)

    def tokens_between(self, since: float, until: float) -> int:
        """Add up the tokens granted in a window."""
        return sum(g[3] for g in self.grants if since <= g[0] < until)

    def most_in_a_second(self, *, tokens: bool = False) -> int:
        """Return the highest number of grants in any window of one second."""
        most = total = start = 0
        for grant in self.grants:
            total += grant[3] if tokens else 1
            while self.grants[start][0] <= grant[0] - 1.0:
                total -= self.grants[start][3] if tokens else 1
                start += 1
            most = max(most, total)
        return most

    def most_in_flight(self) -> int:
        """Return the highest number of calls in flight at once."""
        moves = sorted([(g[0], 1) for g in self.grants] + [(g[1], -1) for g in self.grants])
        most = now = 0
        for _, move in moves:
            now += move
            most = max(most, now)
        return most


@dataclass
class Fleet:
    """Starts worker processes that share limits, and collects their calls."""

    url: str
    prefix: str
    store: LimitStore
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    since: float = 0.0
    until: float = 0.0

    async def limit(self, **limits: int | bool) -> None:
        """Set the limits."""
        await self.store.set(ENDPOINT, MODEL, LimitSettings.model_validate(limits))

    async def start(
        self, *fleet: list[dict], seconds: float, lease_s: float = 2.0, **orders: float
    ) -> None:
        """Start one process per list of runs; all begin together once all are up."""
        self.processes = []
        for runs in fleet:
            body = {"url": self.url, "prefix": self.prefix, "lease_s": lease_s, "runs": runs}
            self.processes.append(await _spawn(body))
        for process in self.processes:
            assert process.stdout is not None
            assert (await process.stdout.readline()).strip() == b"ready"
        self.since = time.monotonic() + 0.5
        self.until = self.since + seconds
        times = {"since": self.since, "until": self.until}
        note = {}
        if "note_after_s" in orders:
            note["note_at"] = self.since + orders["note_after_s"]
            note["retry_after_s"] = orders["retry_after_s"]
        for index, process in enumerate(self.processes):
            assert process.stdin is not None
            order = times | (note if index == 0 else {})
            process.stdin.write(json.dumps(order).encode() + b"\n")
            await process.stdin.drain()

    async def report(self) -> Report:
        """Wait for all processes and collect their calls."""
        report = Report()
        for process in self.processes:
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            body = json.loads(out)
            report.grants += [tuple(grant) for grant in body["grants"]]
            report.calls += body["calls"]
            report.by_process.append(len(body["grants"]))
        report.grants.sort()
        return report


async def _spawn(orders: dict) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.limit_callers",
        json.dumps(orders),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
