"""The program of an isolated attempt's process: executes one request and reports to its worker.

`isolation_server.py` calls it after the fork. The attempt runs as in a worker, with an event loop,
model clients and limits of its own. Model calls, log lines and the completion travel to the worker.
Must not: speak to the broker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from uuid import UUID

import orjson

from pipeline.contract.errors import ModelError
from pipeline.contract.messages import RolloutRequest, parse_message
from pipeline.queue.frames import encode_completions
from pipeline.queue.journal_frames import encode_frames
from pipeline.redaction import Redactor
from pipeline.settings import Settings
from workers.process.activity import Activity, WatchTry, tool_counts
from workers.process.attempt import Attempt
from workers.process.execution import execute
from workers.process.isolated_messages import (
    CALL,
    DONE,
    HAND_BACK,
    HEAD,
    JOURNAL,
    LOG,
    PROGRESS,
    STARTED,
    STOP,
    Frame,
)
from workers.process.journal import MakeFrame
from workers.process.loop import new_loop
from workers.process.runtime import Runtime, open_limits
from workers.process.scoring import SCORING_TRIES, SCORING_WAIT_S

_PROGRESS_S = 0.5
_CLOSE_S = 5.0


def run_isolated(channel: socket.socket, settings: Settings, worker_id: str) -> None:
    """Execute the request that comes over the channel, and send its completion."""
    worker = _Worker(channel)
    logging.basicConfig(level=settings.log_level, handlers=[_SentLog(worker)], force=True)
    request = worker.receive()
    if request is None:
        return
    with asyncio.Runner(loop_factory=new_loop) as runner, suppress(asyncio.CancelledError):
        runner.run(_run(parse_message(RolloutRequest, request.data), worker, settings, worker_id))


async def _run(
    request: RolloutRequest, worker: _Worker, settings: Settings, worker_id: str
) -> None:
    redactor = Redactor.of(settings, os.environ)
    runtime = Runtime(
        settings,
        worker_id,
        limits=open_limits(settings, f"{worker_id}-{os.getpid()}"),
        redactor=redactor,
        activity=_SentActivity(worker, redactor),
        keep=worker.keep,
    )
    worker.send(STARTED)
    commands = {
        STOP: lambda: runtime.in_flight.stop(frozenset({request.label})),
        HAND_BACK: runtime.in_flight.hand_back_all,
    }
    worker.listen(asyncio.get_running_loop(), commands)
    reports = asyncio.create_task(_report_progress(runtime, worker))
    try:
        completion = await asyncio.create_task(execute(request, runtime))
        worker.send(DONE, encode_completions([completion]))
    finally:
        reports.cancel()
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                await runtime.close()


async def _report_progress(runtime: Runtime, worker: _Worker) -> None:
    while True:
        for attempt in runtime.in_flight.attempts():
            worker.send(PROGRESS, _progress_of(attempt))
        await asyncio.sleep(_PROGRESS_S)


def _progress_of(attempt: Attempt) -> bytes:
    tools = {
        name: {"calls": calls, "errors": errors} for name, calls, errors in tool_counts(attempt)
    }
    progress = {"phase": attempt.phase, "step": attempt.step, "tools": tools}
    return orjson.dumps(progress | {"block_s": _longest_block_s(attempt)})


def _longest_block_s(attempt: Attempt) -> float:
    """Return the longest time for which the event loop may be blocked within the time limits."""
    limits = attempt.request.limits
    if attempt.phase == "scoring":
        return SCORING_TRIES * (limits.reward_timeout_s + SCORING_TRIES * SCORING_WAIT_S)
    return limits.timeout_s if attempt.clock is None else max(0.0, attempt.clock.left_s())


class _Worker:
    """The worker at the other end of the channel; `send` may be called from any thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        with self._lock, suppress(OSError):
            self._channel.sendall(Frame(kind, data).encoded())

    def keep(self, make: MakeFrame) -> None:
        """Send a frame of the journal; the worker sends it to the collector."""
        if (frame := make()) is not None:
            self.send(JOURNAL, encode_frames([frame]))

    def receive(self) -> Frame | None:
        """Wait for a message; None: the worker has ended."""
        head = self._read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        kind, length = HEAD.unpack(head)
        data = self._read(length)
        return Frame(kind, data) if len(data) == length else None

    def listen(
        self, loop: asyncio.AbstractEventLoop, commands: Mapping[bytes, Callable[[], object]]
    ) -> None:
        """Call each command on the loop when it arrives; end this process with its worker."""

        def run() -> None:
            while (frame := self.receive()) is not None:
                loop.call_soon_threadsafe(commands[frame.kind])
            os._exit(1)

        threading.Thread(target=run, name="worker-commands", daemon=True).start()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        with suppress(OSError):
            while len(data) < size and (part := self._channel.recv(min(size - len(data), 1 << 20))):
                data += part
        return bytes(data)


class _SentActivity(Activity):
    """Sends model calls and tool calls to the worker, which counts them."""

    def __init__(self, worker: _Worker, redactor: Redactor) -> None:
        super().__init__(redactor=redactor)
        self._worker = worker

    @contextmanager
    def counted(self, attempt: Attempt) -> Iterator[None]:
        try:
            yield
        finally:
            self._worker.send(PROGRESS, _progress_of(attempt))

    def watcher(self, run_id: UUID, base_url: str, model: str) -> WatchTry:
        def watch(error: ModelError | None) -> None:
            call = {"base_url": base_url, "model": model}
            if error is not None:
                call |= {"code": error.code, "reason": self.reason(error)}
            self._worker.send(CALL, orjson.dumps(call))

        return watch


class _SentLog(logging.Handler):
    """Sends log records to the worker, which logs them."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        values = {"name": record.name, "level": record.levelno, "text": text}
        self._worker.send(LOG, orjson.dumps(values | {"exc_text": record.exc_text}, default=str))
