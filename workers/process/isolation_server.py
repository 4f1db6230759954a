"""The server that forks a process for each isolated attempt: one thread, plug-ins loaded.

`isolation.py` starts it as a fresh interpreter, so it inherits no thread, lock or connection of the
worker. A request is one byte with two sockets: the channel of the new process, and its status, on
which the server reports the exit code. Must not: start a thread, or outlive its worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field
from importlib import import_module

from pipeline.contract.errors import PipelineError
from pipeline.redaction import Redactor, redact_logs
from pipeline.service import reduce_garbage_collection
from pipeline.settings import Settings
from workers.core.registry import BUILTIN_AGENTS, get_agent_class
from workers.process.isolated_attempt import run_isolated
from workers.process.isolated_messages import Preload
from workers.process.plugins import load_plugins
from workers.sandbox.kinds import set_default_kind

_PR_SET_PDEATHSIG = 1
#: A machine that runs out of memory ends an isolated process before the worker.
_OOM_SCORE = "500"


def main(control_fd: int) -> None:
    """Load everything, then fork until the worker has ended."""
    with open(0, "rb", closefd=False) as stdin:
        preload: Preload = pickle.load(stdin)
    _read_nothing()
    redact_logs(Redactor.of(preload.settings, os.environ))
    set_default_kind(preload.settings.worker.sandbox)
    _import_library(preload.settings)
    if preload.loads_plugins:
        try:
            load_plugins(preload.settings.worker.plugins)
        except PipelineError as error:
            sys.exit(f"Isolated rollouts run in their worker: {error}")
        if _thread_count() > 1:
            _start_again(preload, control_fd)
    reduce_garbage_collection()
    channel = _Server(socket.socket(fileno=control_fd)).serve()
    if channel is not None:
        if not preload.loads_plugins:
            load_plugins(preload.settings.worker.plugins)
        run_isolated(channel, preload.settings, preload.worker_id)
        os._exit(0)


@dataclass(slots=True)
class _Server:
    control: socket.socket
    statuses: dict[int, socket.socket] = field(default_factory=dict[int, socket.socket])
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> socket.socket | None:
        """Fork on request; return the channel in a new process, None when the worker has ended."""
        woken, waker = os.pipe()
        for fd in (woken, waker):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.selector.register(self.control, selectors.EVENT_READ)
        self.selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.control:
                    data, fds, _, _ = socket.recv_fds(self.control, 1, 2)
                    if not data:
                        return self._end()
                    channel = self._fork(*fds)
                    if channel is not None:
                        os.close(woken)
                        os.close(waker)
                        return channel
                elif key.fileobj == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                    self._reap()
                elif key.data in self.statuses:
                    # The worker closed its end: this process is no longer wanted.
                    self.selector.unregister(key.fileobj)
                    _kill(key.data)

    def _fork(self, channel_fd: int, status_fd: int) -> socket.socket | None:
        for fd in (channel_fd, status_fd):
            os.set_inheritable(fd, False)
        channel, status = socket.socket(fileno=channel_fd), socket.socket(fileno=status_fd)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            print(f"No process for an isolated rollout: {error}", file=sys.stderr)
            channel.close()
            status.close()
            return None
        if pid == 0:
            _become_child(parent)
            self.selector.close()
            for other in (self.control, status, *self.statuses.values()):
                other.close()
            return channel
        channel.close()
        self.statuses[pid] = status
        self.selector.register(status, selectors.EVENT_READ, pid)
        return None

    def _reap(self) -> None:
        """Report processes that have ended, after all processes of their group are killed."""
        for pid in list(self.statuses):
            # Until the process is reaped, no other process can get its pid or process group id.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            status = self.statuses.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(status)
            with contextlib.suppress(OSError):
                status.sendall(str(code).encode())
            status.close()

    def _end(self) -> None:
        for pid in self.statuses:
            _kill(pid)


def _import_library(settings: Settings) -> None:
    """Import modules that each process would otherwise import by itself at their first use."""
    for name in BUILTIN_AGENTS:
        get_agent_class(name)
    client = "lean_client" if settings.llm.client == "lean" else "openai_client"
    # A client that is not installed fails the attempts that need it, as in a worker.
    with contextlib.suppress(ModuleNotFoundError):
        import_module(f"workers.llm.{client}")


def _become_child(parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The group of this process is killed with it.
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write(_OOM_SCORE)
    if os.getppid() != parent:
        os._exit(1)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _start_again(preload: Preload, control_fd: int) -> None:
    """Replace this process by one without plug-ins: a fork would not copy the threads they started.

    Locks that such a thread holds at the fork would stay locked for ever.
    """
    again = Preload(preload.settings, preload.worker_id, preload.path, loads_plugins=False)
    data, (readable, writable) = pickle.dumps(again), os.pipe()
    os.write(writable, data)
    os.close(writable)
    os.dup2(readable, 0)
    os.close(readable)
    os.set_inheritable(control_fd, True)
    command = again.command(control_fd)
    os.execv(command[0], command)


def _thread_count() -> int:
    """Return the number of threads, native ones included; 1 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return 1


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
