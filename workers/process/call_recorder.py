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
from typing import Any

from pipeline.contract.errors import ServiceUnavailable
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
from workers.process.send_retries import SendRetries, parts_of
from workers.process.vital_threads import vital

#: Frames that are sent together.
_MAX_BATCH = 256


@dataclass(slots=True)
class _Waiting:
    """A frame, and the call that waits for its confirmation."""

    frame: JournalFrame
    sent: Future[None]
    inline_max_bytes: int  #: a longer body goes to the payload store


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
        self._retries = SendRetries()
        #: From then on each frame is tried once, so that no call waits for an absent broker.
        self.give_up_after = self._retries.give_up_after

    async def record(self, frame: JournalFrame) -> None:
        """Return when the broker has the frame; while it is away, wait.

        Raises:
            ServiceUnavailable: The process stops, and the broker or the payload store is away.
        """
        sent: Future[None] = Future()
        # The frame is sent even if its call is cancelled from now on.
        sent.set_running_or_notify_cancel()
        self._queue.put(_Waiting(frame, sent, self._inline_max_bytes))
        await asyncio.wrap_future(sent)

    def close(self) -> None:
        """Send the remaining frames, until it is time to give up."""
        self._queue.put(None)
        self.join(self._retries.longest_end_s())

    def run(self) -> None:
        """Send frames until closed."""
        with vital(self.name):
            while (first := self._queue.get()) is not None:
                # Frames that come while a message is being confirmed go into the next one.
                batch = [first]
                while len(batch) < _MAX_BATCH and not self._queue.empty():
                    waiting = self._queue.get()
                    if waiting is None:
                        self._queue.put(None)
                        break
                    batch.append(waiting)
                for part in parts_of(batch, lambda waiting: len(waiting.frame.body)):
                    self._send(part)
            self._publisher.close()

    def _send(self, part: Sequence[_Waiting]) -> None:
        unsent = self._retries.send(
            part,
            self._publish,
            shorten=_by_reference,
            describe=lambda n: f"{n} recorded calls wait for the broker or the payload store",
        )
        for waiting, error in unsent:
            waiting.sent.set_exception(error)

    def _publish(self, part: Sequence[_Waiting]) -> None:
        for waiting in part:
            frame = waiting.frame
            if frame.body_uri is None and len(frame.body) > waiting.inline_max_bytes:
                waiting.frame = check_out_frame(frame, self._payloads)
        self._publisher.send_journal([waiting.frame for waiting in part])
        for waiting in part:
            waiting.sent.set_result(None)


def _by_reference(waiting: _Waiting, _: FrameTooLong) -> _Waiting | None:
    """Let a body go to the payload store; a header alone always fits."""
    waiting.inline_max_bytes = -1
    return waiting if waiting.frame.body_uri is None else None


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
        except ServiceUnavailable as error:
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
