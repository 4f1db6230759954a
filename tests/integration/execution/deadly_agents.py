"""Agents that end, block or leave their process: a plug-in of isolated attempts."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from workers.core.registry import register_agent
from workers.sandbox.base import SandboxLimits
from workers.sandbox.process import ProcessSandbox

log = logging.getLogger(__name__)


def _abort() -> None:
    ctypes.CDLL(None).abort()


def _use_all_memory() -> None:
    """Use more memory than allowed, in code that ends the process then, as native code does."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    allocate = ctypes.CDLL(None).malloc
    allocate.restype = ctypes.c_void_p
    while allocate(ctypes.c_size_t(64 << 20)):
        pass
    _abort()


def _leave_a_process() -> None:
    """End, and leave a forked process that holds all descriptors open."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(8)
        os._exit(0)
    os._exit(4)


async def _run_command(folder: Path) -> None:
    """Start a command in a sandbox, and die in the midst of it once a file says so."""
    sandbox = ProcessSandbox(folder / "root", SandboxLimits())
    command = asyncio.create_task(sandbox.run("echo $$ > new; mv new pid; sleep 1000"))
    while not command.done() and not (folder / "die").exists():
        await asyncio.sleep(0.02)
    os._exit(3)


def _kill_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


DEEDS: dict[str, Any] = {
    "abort": _abort,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_server": _kill_server,
    "leave": _leave_a_process,
    "memory": _use_all_memory,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close_all": lambda: os.closerange(3, 1024),
}


@register_agent("doer")
async def doer(prompt: dict[str, Any], llm: Any) -> str:
    """Do the deed of the prompt, then answer with this process's pid."""
    del llm
    deed = prompt.get("deed", "")
    if deed == "sleep":
        folder = Path(prompt["folder"])
        sleeper = subprocess.Popen(["sleep", "1000"])
        (folder / "sleeper").write_text(f"{os.getpid()} {sleeper.pid}")
        (folder / "sleeper").rename(folder / "pids")
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            (folder / "cancelled").touch()
            raise
    if deed == "command":
        await _run_command(Path(prompt["folder"]))
    if deed == "block":
        while True:
            time.sleep(0.01)
    if deed == "log":
        log.warning("A line of the isolated agent.")
        threading.Thread(target=log.warning, args=("A line of its thread.",)).start()
    if deed == "raise":
        raise ValueError("an ordinary error")
    if deed in DEEDS:
        DEEDS[deed]()
    return str(os.getpid())
