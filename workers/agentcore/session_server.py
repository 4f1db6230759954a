"""The process that has loaded an app and forks one process per session, each serving on a socket.

`session_processes.py` starts it. Requests and reports are JSON lines: `{"start": id, "socket":
path}` and `{"stop": id}` come in, `{"loaded": ...}`, `{"ended": id, "status": n}` go out. The
process ends at the end of its input, with all its sessions. Must not: start a thread before a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import selectors
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
#: Modules that servers and model clients import at their first use.
_LAZY_MODULES = (
    "anyio._backends._asyncio",
    "httpcore2",
    "openai.resources.chat",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.auto",
)
#: Time from SIGTERM to SIGKILL: a stopped app saves its error result.
GRACE_S = 15.0


def main(path: str) -> None:
    """Load an app, then fork until the input ends."""
    # The output of the app goes to stderr: stdout carries the reports.
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        app = load_app(Path(path))
    # Broad on purpose: an app is foreign code, and the caller reports its error.
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        print(json.dumps({"loaded": False, "error": reason}), file=reports)
        raise
    _warm(app)
    print(json.dumps({"loaded": True}), file=reports)
    _Forks(app, reports).run()


def load_app(path: Path) -> Any:
    """Return the one app that a script makes, without running its `__main__` part.

    Raises:
        ValueError: The script makes none.
    """
    sys.path.insert(0, str(path.resolve().parent))
    names = runpy.run_path(str(path), run_name="agentcore_app")
    apps = [value for value in names.values() if _is_app(value)]
    if not apps:
        raise ValueError(f"{path} makes no app; it needs one such as `app = AgentCoreRLApp()`")
    return apps[0]


def _warm(app: Any) -> None:
    """Import modules and make clients once for all sessions; no connection is opened."""
    for name in _LAZY_MODULES:
        with contextlib.suppress(ImportError):
            import_module(name)
    for client in ("s3_client", "sqs_client"):
        # Without a region there is no client; the session's own error then names the cause.
        with contextlib.suppress(Exception):
            getattr(app, client)


def _is_app(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("entrypoint", "run")
    )


class _Forks:
    def __init__(self, app: Any, reports: Any) -> None:
        self._app = app
        self._reports = reports
        self._pids: dict[str, int] = {}
        self._kill_at: dict[str, float] = {}

    def run(self) -> None:
        """Fork and reap until the input ends; then end all sessions."""
        woken, waker = os.pipe()
        for fd in (woken, waker):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in selector.select(1.0 if self._kill_at else None):
                if key.fd != 0:
                    os.read(woken, 4096)
                    continue
                data = os.read(0, 65536)
                if not data:
                    self._end()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
            self._reap()
            self._kill_late()

    def _handle(self, request: dict[str, str]) -> None:
        if session := request.get("stop"):
            self._signal(session, signal.SIGTERM)
            self._kill_at.setdefault(session, time.monotonic() + GRACE_S)
            return
        session = request["start"]
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[session] = pid
            return
        _serve(self._app, request["socket"], server)

    def _reap(self) -> None:
        while self._pids:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for session, known in list(self._pids.items()):
                if known == pid:
                    del self._pids[session]
                    self._kill_at.pop(session, None)
                    report = {"ended": session, "status": os.waitstatus_to_exitcode(status)}
                    print(json.dumps(report), file=self._reports)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for session, at in list(self._kill_at.items()):
            if now >= at:
                self._signal(session, signal.SIGKILL)

    def _signal(self, session: str, number: signal.Signals) -> None:
        # The system does not reuse a pid before its process is reaped here.
        if pid := self._pids.get(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self) -> NoReturn:
        for session in self._pids:
            self._signal(session, signal.SIGKILL)
        os._exit(0)


def _serve(app: Any, socket: str, server: int) -> NoReturn:
    """Serve a session in this new process until it is stopped."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        app.run(uds=socket)
        status = 0
    finally:
        # The cleanup handlers of the server must not run in this process.
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
