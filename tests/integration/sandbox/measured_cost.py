"""Measures a sandboxed command beside `bwrap` alone, in turn; prints one JSON line a round.

A process of its own, as nice as the sandbox makes its commands, and each command a session of its
own on both sides: on a busy machine the two would otherwise not get the same share of it.

    python measured_cost.py COMMAND PAIRS ROUNDS
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time

from workers.sandbox.base import Sandbox
from workers.sandbox.child_process import NICENESS
from workers.sandbox.command_line import find_shell
from workers.sandbox.kinds import open_sandbox


def bwrap_alone(command: str) -> list[str]:
    """The least that gives namespaces, a read-only system and a private /tmp."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [*words, find_shell(), "-c", command]


async def run_alone(command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *bwrap_alone(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
        start_new_session=True,
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()


async def run_sandboxed(sandbox: Sandbox, command: str) -> None:
    result = await sandbox.run(command)
    assert result.succeeded, result.stderr


async def measure(command: str, pairs: int, rounds: int) -> None:
    os.nice(NICENESS - os.nice(0))
    async with await open_sandbox("bubblewrap") as sandbox:
        await run_sandboxed(sandbox, command)
        for _ in range(rounds):
            alone, ours = [], []
            for _ in range(pairs):
                started = time.perf_counter()
                await run_alone(command)
                between = time.perf_counter()
                await run_sandboxed(sandbox, command)
                alone.append(between - started)
                ours.append(time.perf_counter() - between)
            medians = {"alone": statistics.median(alone), "ours": statistics.median(ours)}
            print(json.dumps(medians), flush=True)


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
