"""The outbox: collects completions briefly, sends them together, keeps them until they are sent.

Filled by the event loop, emptied by a thread. Completions that are unsent when the worker must end
go to the spool. Frames of journals are made here, and sent before the completions that were put in
after them. A journal only saves work, so a frame that cannot be made or sent is dropped. Must not:
lose a completion.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import (
    AttemptBeat,
    AttemptKey,
    Completion,
    ErrorRecord,
    JournalFrame,
)
from pipeline.queue.claim_checks import check_out
from pipeline.queue.completions import FrameTooLong, OutcomePublisher
from pipeline.queue.frames import encode_completions
from pipeline.queue.journal_frames import check_out_frame
from pipeline.queue.payloads import PayloadStore
from workers.process.journal import MakeFrame
from workers.process.send_retries import SendRetries, parts_of
from workers.process.spool import Spool
from workers.process.vital_threads import vital

log = logging.getLogger(__name__)

#: Long enough to gather completions that end together, short compared with any rollout.
_LINGER_S = 0.1
_MAX_BATCH = 64
#: A completion unsent for longer is listed in heartbeats, so that its lease is renewed.
_REPORTED_AFTER_S = 1.0


class Outbox(threading.Thread):
    """Sends completions until closed, then sends the rest.

    Args:
        publisher: A connection that no other thread uses.
        payloads: The store that large bodies are written to before their message is sent.
        inline_max_bytes: Most bytes of both bodies that travel in a message; -1 sends none.
        spool: Folder for completions that could not be sent before the end.
    """

    def __init__(
        self,
        publisher: OutcomePublisher,
        payloads: PayloadStore,
        *,
        inline_max_bytes: int,
        spool: Path,
    ) -> None:
        super().__init__(name="outbox", daemon=True)
        self._publisher = publisher
        self._payloads = payloads
        self._inline_max_bytes = inline_max_bytes
        self._spool = Spool(spool)
        self._retries = SendRetries()
        self._queue: queue.SimpleQueue[Completion | MakeFrame | None] = queue.SimpleQueue()
        self._waiting_since: dict[AttemptKey, float] = {}
        self._closing = threading.Event()

    def put(self, completion: Completion) -> None:
        """Take a completion; never blocks."""
        self._waiting_since[completion.key] = time.monotonic()
        self._queue.put(completion)

    def put_frame(self, make: MakeFrame) -> None:
        """Take a function that makes a frame of a journal when it is sent; never blocks."""
        self._queue.put(make)

    def beats(self) -> tuple[AttemptBeat, ...]:
        """Return the attempts whose completion waits for the broker or the payload store.

        Heartbeats list them, or their leases would end and the work would be repeated.
        """
        before = time.monotonic() - _REPORTED_AFTER_S
        return tuple(
            AttemptBeat(rollout_id=key[0], attempt_no=key[1], phase="sending")
            for key, since in list(self._waiting_since.items())
            if since < before
        )

    def close(self, *, timeout_s: float) -> None:
        """Send the remaining completions; after `timeout_s` write them to the spool instead."""
        self._retries.give_up_after(timeout_s)
        self._closing.set()
        self._queue.put(None)  # the end
        self.join(self._retries.longest_end_s())

    def run(self) -> None:
        """Send batches until closed."""
        with vital(self.name):
            self._run()

    def _run(self) -> None:
        self._spool.send_all(self._send)
        stopping = False
        while not stopping:
            items, stopping = self._gather()
            self._send_frames(item for item in items if not isinstance(item, Completion))
            batch = [item for item in items if isinstance(item, Completion)]
            batch = [self._without_large_body(completion) for completion in batch]
            for part in parts_of(batch, _bodies_size):
                if unsent := self._send(part):
                    self._spool.write(unsent)
        self._publisher.close()

    def _gather(self) -> tuple[list[Completion | MakeFrame], bool]:
        first = self._queue.get()
        if first is None:
            return [], True
        batch: list[Completion | MakeFrame] = [first]
        # A blocking `get` would wake this thread for every completion.
        if self._queue.qsize() < _MAX_BATCH - 1:
            self._closing.wait(_LINGER_S)
        while len(batch) < _MAX_BATCH:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _send_frames(self, makers: Iterable[MakeFrame]) -> None:
        for part in parts_of(self._made(makers), lambda frame: len(frame.body)):
            self._retries.send(
                part,
                self._publisher.send_journal,
                shorten=_dropped,
                describe=lambda n: f"{n} frames of journals wait for the broker",
            )

    def _made(self, makers: Iterable[MakeFrame]) -> Iterator[JournalFrame]:
        for make in makers:
            # Broad on purpose: a frame that cannot be made must not end the outbox.
            try:
                frame = make()
                if frame is not None and len(frame.body) > self._inline_max_bytes:
                    frame = check_out_frame(frame, self._payloads)
            except Exception as error:
                log.warning("A frame of a journal is dropped: %s", error)
                continue
            if frame is not None:
                yield frame

    def _without_large_body(self, completion: Completion) -> Completion:
        size = _bodies_size(completion)
        if size <= self._inline_max_bytes or not size:
            return completion
        return self._by_reference(completion) or completion

    def _by_reference(self, completion: Completion) -> Completion | None:
        """Return a completion with its bodies in the payload store; None: it gives no answer."""
        failures = 0
        while True:
            try:
                return check_out(completion, self._payloads)
            # Broad on purpose: the completion is kept, whatever the payload store raises.
            except Exception as error:
                failures += 1
                text = f"{completion.label} waits for the payload store"
                if not self._retries.wait(failures, text, error):
                    return None

    def _send(self, part: Sequence[Completion]) -> list[Completion]:
        """Send completions; return those that were not sent when it was time to give up."""
        unsent = self._retries.send(
            part,
            self._publish,
            shorten=self._shortened,
            describe=lambda n: f"{n + self._queue.qsize()} completions wait for the broker",
            repair=self._encodable,
        )
        return [completion for completion, _ in unsent]

    def _publish(self, part: Sequence[Completion]) -> None:
        self._publisher.send_completions(part)
        for completion in part:
            self._waiting_since.pop(completion.key, None)

    def _shortened(self, completion: Completion, error: FrameTooLong) -> Completion | None:
        """Return a completion in fewer bytes: its body by reference, else a failure."""
        log.warning("%s does not fit into a message: %s", completion.label, error)
        if completion.body or completion.tokens:
            return self._by_reference(completion)
        # The texts of an error are bounded by the contract and always fit.
        return _too_long(completion)

    def _encodable(self, part: Sequence[Completion]) -> list[Completion]:
        """Drop completions that can never be sent; their leases end, and the rollouts run again."""
        log.exception("%d completions could not be sent.", len(part))
        kept: list[Completion] = []
        for completion in part:
            try:
                encode_completions([completion])
                kept.append(completion)
            except (ValueError, TypeError) as error:
                log.error("%s has an outcome that cannot be encoded: %s", completion.label, error)
                self._waiting_since.pop(completion.key, None)
        return kept


def _bodies_size(completion: Completion) -> int:
    return len(completion.body) + len(completion.tokens)


def _dropped(frame: JournalFrame, error: FrameTooLong) -> None:
    log.warning("A frame of the journal of %s is dropped: %s", frame.label, error)


def _too_long(completion: Completion) -> Completion:
    """Return a failure in place of a completion that fits into no message."""
    return Completion(
        **completion.identity,
        worker_id=completion.worker_id,
        purpose=completion.purpose,
        outcome="failed",
        error=ErrorRecord(
            error_class=ErrorClass.CONTRACT,
            code="completion_too_large",
            message="Its outcome does not fit into a message of this broker. Return fewer reward "
            "parts, or a shorter trajectory.",
        ),
    )
