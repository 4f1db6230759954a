"""The worker's end of an isolated attempt: receives its messages, and explains its exit.

Made by `isolation.py`, used on the event loop. A process whose event loop does not answer is killed
once its time limit must have passed. Must not: block the loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any, Self

import orjson

from pipeline.contract.errors import (
    AgentTimeout,
    ErrorClass,
    ModelError,
    ProcessDied,
    RewardError,
    RolloutError,
)
from pipeline.contract.messages import Completion
from pipeline.queue.frames import decode_completions
from pipeline.queue.journal_frames import decode_frames
from workers.process.activity import Activity
from workers.process.agent_timeout import CANCEL_GRACE_S
from workers.process.attempt import Attempt
from workers.process.in_flight import InFlight
from workers.process.isolated_messages import (
    CALL,
    DONE,
    HAND_BACK,
    HEAD,
    JOURNAL,
    LOG,
    PROGRESS,
    REQUEST,
    STARTED,
    STOP,
    Frame,
)
from workers.process.journal import MakeFrame

#: Time to start: the first process of a worker waits for its server's imports.
_START_S = 120.0
#: Time for the remaining messages of a process that ended, and for its exit after its completion.
_REST_S = 5.0
#: A busy machine may delay a message this long beyond the time limit.
_MARGIN_S = 5.0


class ServerDied(RolloutError):
    """The server of isolated processes died, and this process with it."""

    error_class = ErrorClass.WORKER_LOST
    code = "server_died"


class IsolatedChild:
    """One process, from its start to its end."""

    def __init__(
        self,
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        status: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        keep: Callable[[MakeFrame], None] | None,
    ) -> None:
        self._reader, self._writer = channel
        self._status, self._killer = status
        self._keep = keep
        self._deadline = asyncio.get_running_loop().time() + _START_S
        self._has_started = False
        self._completion: Completion | None = None

    @classmethod
    async def connect(
        cls,
        channel: socket.socket,
        status: socket.socket,
        *,
        keep: Callable[[MakeFrame], None] | None = None,
    ) -> Self:
        """Connect to a requested process by its sockets; `keep` takes the frames of its journal."""
        return cls(
            await asyncio.open_unix_connection(sock=channel),
            await asyncio.open_unix_connection(sock=status),
            keep,
        )

    def close(self) -> None:
        """Kill the process with all that it started, if it has not ended."""
        self._killer.close()
        self._writer.close()

    async def run(
        self, attempt: Attempt, in_flight: InFlight, activity: Activity
    ) -> Completion | None:
        """Run an attempt to its completion; None: the process never started.

        Raises:
            ProcessDied: The process died, and its server lives.
            RolloutError: It did not answer beyond its time limit, or its server died.
            asyncio.CancelledError: The attempt is no longer wanted.
        """
        self._send(REQUEST, attempt.request.model_dump_json(exclude_defaults=True).encode())
        receiving = asyncio.create_task(self._receive(attempt, activity))
        try:
            await asyncio.wait({receiving})
        except asyncio.CancelledError:
            is_handed_back = in_flight.is_handed_back(attempt)
            # The agent may clean up, as after a cancellation in a worker.
            self._send(HAND_BACK if is_handed_back else STOP)
            await asyncio.wait({receiving}, timeout=CANCEL_GRACE_S + _REST_S)
            if is_handed_back and self._completion is not None:
                return self._completion
            raise
        finally:
            receiving.cancel()
        return receiving.result()

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        self._writer.write(Frame(kind, data).encoded())

    async def _receive(self, attempt: Attempt, activity: Activity) -> Completion | None:
        """Receive messages until the process has ended; return its completion, None: no start."""
        loop = asyncio.get_running_loop()
        status = asyncio.create_task(self._status.read())
        reading = asyncio.create_task(self._read())
        try:
            while True:
                waited = {reading} if status.done() else {reading, status}
                left_s = max(0.0, self._deadline - loop.time())
                await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    frame = reading.result()
                    if frame is None:
                        break
                    self._take(frame, attempt, activity)
                    reading = asyncio.create_task(self._read())
                elif status.done() and status in waited:
                    # Messages that the process sent before its exit may still arrive.
                    self._deadline = loop.time() + _REST_S
                elif loop.time() >= self._deadline:
                    break
            return await self._outcome(attempt, status, is_unresponsive=not reading.done())
        finally:
            status.cancel()
            reading.cancel()

    def _take(self, frame: Frame, attempt: Attempt, activity: Activity) -> None:
        now = asyncio.get_running_loop().time()
        if frame.kind == STARTED:
            self._has_started = True
            self._deadline = now + attempt.request.limits.timeout_s + CANCEL_GRACE_S + _MARGIN_S
        elif frame.kind == PROGRESS:
            progress = orjson.loads(frame.data)
            attempt.phase, attempt.reported_step = progress["phase"], progress["step"]
            attempt.trajectory.metadata["tools"] = progress["tools"]
            self._deadline = now + progress["block_s"] + CANCEL_GRACE_S + _MARGIN_S
        elif frame.kind == CALL:
            call = orjson.loads(frame.data)
            error = ModelError(call["reason"], code=call["code"]) if "code" in call else None
            activity.watcher(attempt.request.run_id, call["base_url"], call["model"])(error)
        elif frame.kind == LOG:
            _log(orjson.loads(frame.data))
        elif frame.kind == JOURNAL and self._keep is not None:
            for kept in decode_frames(frame.data):
                self._keep(lambda kept=kept: kept)
        elif frame.kind == DONE:
            self._completion = decode_completions(frame.data)[0][0]
            self._deadline = now + _REST_S

    async def _outcome(
        self, attempt: Attempt, status: asyncio.Task[bytes], *, is_unresponsive: bool
    ) -> Completion | None:
        """Return the completion; raise the error that explains its absence."""
        if self._completion is not None:
            return self._completion
        if not self._has_started:
            return None
        if is_unresponsive and not status.done():
            raise _unresponsive(attempt)
        # The channel is closed: the process has ended, or can send nothing more.
        await asyncio.wait({status}, timeout=_REST_S)
        code = status.result() if status.done() else str(-signal.SIGKILL).encode()
        if not code:
            raise ServerDied(
                "The server of this worker's isolated processes died, and its processes with it."
            )
        raise ProcessDied(
            f"The process of its own in which the rollout ran {_describe_exit(int(code))} "
            "before the rollout was done; its worker lives."
        )

    async def _read(self) -> Frame | None:
        try:
            kind, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            return Frame(kind, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def _unresponsive(attempt: Attempt) -> RolloutError:
    text = (
        "The process of the rollout did not answer until its time limit had passed; it was ended."
    )
    if attempt.phase == "scoring":
        return RewardError(text, code="reward_timeout")
    return AgentTimeout(text, code="process_blocked")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"was ended by the signal {name}"


def _log(values: dict[str, Any]) -> None:
    logger = logging.getLogger(values["name"])
    if not logger.isEnabledFor(values["level"]):
        return
    logger.handle(
        logging.makeLogRecord(
            {
                "name": values["name"],
                "levelno": values["level"],
                "levelname": logging.getLevelName(values["level"]),
                "msg": "%s",
                "args": (values["text"],),
                "exc_text": values["exc_text"],
            }
        )
    )
