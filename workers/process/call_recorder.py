"""Records the calls of remote attempts: an answer waits until the broker has confirmed its record.

Used by a gateway alone. Its event loop hands over frames of journals; a thread sends them, those of
concurrent calls together. Must not: drop a frame while the process lives.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from pipeline.contract.errors import QueueUnavailable, ServiceUnavailable
from pipeline.contract.journal import CallKey, pack_calls
from pipeline.contract.messages import JournalFrame
from pipeline.contract.model_call import ModelCall
from pipeline.contract.trajectory import dump_json
from pipeline.queue.completions import FrameTooLong, OutcomePublisher
from pipeline.queue.gateway_keys import GatewayKey
from pipeline.queue.journal_frames import check_out_frame
from pipeline.queue.payloads import PayloadStore
from pipeline.redaction import Redactor
from pipeline.tokens.recorded_calls import recorded_call
from workers.core.model_response import ModelResponse
from workers.gateway.live_call import RequestMarks
from workers.gateway.rejections import Rejection
from workers.process.model_calls import ModelCalls
from workers.process.vital_threads import vital

log = getLogger(__name__)

#: Frames, and bytes of their bodies, in one message.
_MOST, _MOST_BYTES = 256, 180_000
_MAX_BACKOFF_S = 5.0
#: Longest wait for a publisher whose broker stopped answering, after the time to give up.
_LAST_TRY_S = 30.0


@dataclass(slots=True)
class _Waiting:
    """A frame, and the call that waits for its confirmation."""

    frame: JournalFrame
    sent: Future[None]


class CallRecorder(threading.Thread):
    """Sends frames until closed.

    Args:
        publisher: A connection that no other thread uses.
        payloads: The store that large bodies are written to before their message is sent.
        inline_max_bytes: Most bytes of a body that travels in a message; -1 sends none.
    """

    def __init__(
        self, publisher: OutcomePublisher, payloads: PayloadStore, *, inline_max_bytes: int
    ) -> None:
        super().__init__(name="call recorder", daemon=True)
        self._publisher = publisher
        self._payloads = payloads
        self._inline_max_bytes = inline_max_bytes
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._give_up_at = float("inf")

    async def record(self, frame: JournalFrame) -> None:
        """Return when the broker has the frame; while it is away, wait.

        Raises:
            QueueUnavailable: The process stops, and the broker does not answer.
        """
        sent: Future[None] = Future()
        # From now on the frame is sent, also if its call is cancelled.
        sent.set_running_or_notify_cancel()
        self._queue.put(_Waiting(frame, sent))
        await asyncio.wrap_future(sent)

    def give_up_after(self, timeout_s: float) -> None:
        """From then on try each frame once, so that no call waits for an absent broker."""
        self._give_up_at = time.monotonic() + timeout_s

    def close(self) -> None:
        """Send the remaining frames, until it is time to give up."""
        self._queue.put(None)
        self.join(max(0.0, self._give_up_at - time.monotonic()) + _LAST_TRY_S)

    def run(self) -> None:
        """Send frames until closed."""
        with vital(self.name):
            while (first := self._queue.get()) is not None:
                # Frames that come while a message is being confirmed go into the next one.
                part, size = [first], len(first.frame.body)
                while len(part) < _MOST and size < _MOST_BYTES and not self._queue.empty():
                    waiting = self._queue.get()
                    if waiting is None:
                        self._queue.put(None)
                        break
                    part.append(waiting)
                    size += len(waiting.frame.body)
                self._send(part)
            self._publisher.close()

    def _send(self, part: Sequence[_Waiting]) -> None:
        failures = 0
        while True:
            try:
                for waiting in part:
                    if len(waiting.frame.body) > self._inline_max_bytes:
                        waiting.frame = check_out_frame(waiting.frame, self._payloads)
                self._publisher.send_journal([waiting.frame for waiting in part])
            except FrameTooLong:
                if len(part) > 1:
                    middle = len(part) // 2
                    self._send(part[:middle])
                    return self._send(part[middle:])
                # Its header alone always fits.
                part[0].frame = check_out_frame(part[0].frame, self._payloads)
            except (QueueUnavailable, ServiceUnavailable) as error:
                failures += 1
                if time.monotonic() > self._give_up_at:
                    for waiting in part:
                        waiting.sent.set_exception(error)
                    return None
                if failures % 10 == 1:
                    log.warning("%d recorded calls wait: %s", len(part), error)
                time.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))
            else:
                for waiting in part:
                    waiting.sent.set_result(None)
                return None


class AttemptRecord:
    """Records the calls of one attempt before they are answered.

    Args:
        key: The attempt.
        calls: Its model calls.
        recorder: Sends the frames.
        redactor: Removes secrets from what is stored.
    """

    def __init__(
        self, key: GatewayKey, calls: ModelCalls, recorder: CallRecorder, redactor: Redactor
    ) -> None:
        self._key = key
        self._calls = calls
        self._recorder = recorder
        self._redactor = redactor
        self._last = 0
        #: The key of each call, by its sequence number.
        self._keys: dict[int, CallKey] = {}

    async def recorded(
        self, work: Coroutine[Any, Any, ModelResponse], marks: RequestMarks
    ) -> ModelResponse:
        """Await a call, and return its answer when its record is confirmed.

        Raises:
            Rejection: The process stops without a record; the request may be repeated elsewhere.
            Exception: The error of the call.
        """
        response = await work
        # No other call has run since this one was added.
        frame = self._frame_of(self._calls.calls[-1], marks)
        try:
            await self._recorder.record(frame)
        except (QueueUnavailable, ServiceUnavailable) as error:
            raise Rejection(503, str(error), code="not_recorded", may_repeat=True) from error
        return response

    def _frame_of(self, call: ModelCall, marks: RequestMarks) -> JournalFrame:
        # Later than all calls before it, also if the clock was set back.
        self._last = max(self._last + 1, time.time_ns())
        key = self._keys[call.sequence] = (self._key.attempt_no, self._last)
        tokens = call.tokens
        prefix = (
            self._keys[tokens.prefix_call] if tokens is not None and tokens.prefix_len else None
        )
        entry = recorded_call(
            self._redacted(call),
            key,
            prefix=prefix,
            identity=marks.identity,
            supersedes=marks.supersedes,
        )
        body = pack_calls([entry])
        return JournalFrame(
            **self._key.identity,
            first=self._last,
            n_calls=1,
            body=body,
            body_bytes=len(body),
        )

    def _redacted(self, call: ModelCall) -> ModelCall:
        data = dump_json(call.model_dump())
        redacted = self._redactor.data(data)
        if redacted == data:
            return call
        changed = ModelCall.model_validate(json.loads(redacted))
        changed.tokens = call.tokens
        return changed
