"""The outbox: collects completions briefly, sends them together, keeps them until they are sent.

Filled by the event loop, emptied by a thread. Completions that are unsent when the worker must end
are written to a folder (the spool); the next worker that starts there sends them. Frames of
journals are made here, and sent before the completions that were put in after them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from pathlib import Path

from pipeline.contract.errors import ErrorClass, MalformedMessage, QueueUnavailable
from pipeline.contract.messages import AttemptBeat, AttemptKey, Completion, ErrorRecord
from pipeline.queue.claim_checks import check_out
from pipeline.queue.completions import FrameTooLong, OutcomePublisher
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.payloads import PayloadStore
from workers.process.journal import MakeFrame
from workers.process.journal_sender import JournalSender
from workers.process.vital_threads import vital

log = logging.getLogger(__name__)

#: Long enough to gather completions that end together, short compared with any rollout.
_LINGER_S = 0.1
_MOST = 64
#: Size of the bodies in a message. The publisher measures the whole message.
_MOST_BYTES = 180_000
#: Longest wait for a publisher whose broker stopped answering, after the time to give up.
_LAST_TRY_S = 30.0
_MAX_BACKOFF_S = 5.0
#: A completion unsent for longer than this is reported in heartbeats, so that its lease is renewed.
_AWAY_S = 1.0


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
        self._spool = spool
        self._journals = JournalSender(publisher, payloads, inline_max_bytes=inline_max_bytes)
        self._queue: queue.SimpleQueue[Completion | MakeFrame | None] = queue.SimpleQueue()
        self._waiting_since: dict[AttemptKey, float] = {}
        self._give_up_at = float("inf")
        self._closing = threading.Event()

    def put(self, completion: Completion) -> None:
        """Take a completion; never blocks."""
        self._waiting_since[completion.key] = time.monotonic()
        self._queue.put(completion)

    def put_frame(self, make: MakeFrame) -> None:
        """Take a frame of a journal, which is made when it is sent; never blocks."""
        self._queue.put(make)

    def beats(self) -> tuple[AttemptBeat, ...]:
        """Return the attempts whose completion waits for the broker or the payload store.

        Heartbeats list them, or their leases would end and the work would be repeated.
        """
        before = time.monotonic() - _AWAY_S
        return tuple(
            AttemptBeat(rollout_id=key[0], attempt_no=key[1], phase="sending")
            for key, since in list(self._waiting_since.items())
            if since < before
        )

    def close(self, *, timeout_s: float) -> None:
        """Send the remaining completions; after `timeout_s` write them to the spool instead."""
        self._give_up_at = time.monotonic() + timeout_s
        self._closing.set()
        self._queue.put(None)  # the end
        self.join(timeout_s + _LAST_TRY_S)

    def run(self) -> None:
        """Send batches until closed."""
        with vital(self.name):
            self._run()

    def _run(self) -> None:
        self._send_spooled()
        stopping = False
        while not stopping:
            items, stopping = self._gather()
            makers = [item for item in items if not isinstance(item, Completion)]
            self._journals.send(makers, give_up_at=lambda: self._give_up_at)
            batch = [item for item in items if isinstance(item, Completion)]
            batch = [self._without_large_body(completion) for completion in batch]
            while batch:
                unsent = self._send(_take_part(batch))
                if unsent:
                    self._write_spool(unsent)
        self._publisher.close()

    def _gather(self) -> tuple[list[Completion | MakeFrame], bool]:
        first = self._queue.get()
        if first is None:
            return [], True
        batch: list[Completion | MakeFrame] = [first]
        # A blocking `get` would wake this thread for every completion.
        if self._queue.qsize() < _MOST - 1:
            self._closing.wait(_LINGER_S)
        while len(batch) < _MOST:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _without_large_body(self, completion: Completion) -> Completion:
        size = _bodies_size(completion)
        if size <= self._inline_max_bytes or not size:
            return completion
        return self._by_reference(completion)

    def _by_reference(self, completion: Completion) -> Completion:
        failures = 0
        while True:
            try:
                return check_out(completion, self._payloads)
            except Exception as error:
                failures += 1
                if time.monotonic() > self._give_up_at:
                    return completion
                if failures % 10 == 1:
                    log.error("%s waits for the payload store: %s", completion.label, error)
                time.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))

    def _send(self, part: list[Completion]) -> list[Completion]:
        """Send completions; return those that were not sent when it was time to give up."""
        failures = 0
        while part:
            try:
                self._publisher.send_completions(part)
                for completion in part:
                    self._waiting_since.pop(completion.key, None)
                return []
            except FrameTooLong as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    return self._send(part[:middle]) + self._send(part[middle:])
                shorter = self._shortened(part[0], str(error))
                if shorter is part[0]:  # the payload store does not take its body either
                    return part
                part = [shorter]
            # Broad on purpose: if this thread ended, heartbeats would renew its attempts for ever.
            except Exception as error:
                if not isinstance(error, QueueUnavailable):
                    log.exception("%d completions could not be sent.", len(part))
                    part = self._encodable(part)
                failures += 1
                if time.monotonic() > self._give_up_at:
                    return part
                if failures % 10 == 1:
                    log.warning(
                        "%d completions wait for the broker: %s",
                        len(part) + self._queue.qsize(),
                        error,
                    )
                time.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))
        return []

    def _shortened(self, completion: Completion, reason: str) -> Completion:
        """Return a completion in fewer bytes: its body by reference, else a failure."""
        log.warning("%s does not fit into a message: %s", completion.label, reason)
        if completion.body or completion.tokens:
            return self._by_reference(completion)
        # The texts of an error are bounded by the contract and always fit.
        return _too_long(completion)

    def _encodable(self, part: list[Completion]) -> list[Completion]:
        """Drop completions that can never be sent; their leases end, and the rollouts run again."""
        kept: list[Completion] = []
        for completion in part:
            try:
                encode_completions([completion])
                kept.append(completion)
            except (ValueError, TypeError) as error:
                log.error("%s has an outcome that cannot be encoded: %s", completion.label, error)
                self._waiting_since.pop(completion.key, None)
        return kept

    def _write_spool(self, unsent: list[Completion]) -> None:
        self._spool.mkdir(parents=True, exist_ok=True)
        path = self._spool / f"{unsent[0].label}-{len(unsent)}-{uuid.uuid4().hex[:12]}.frame"
        # Another worker that starts here must not read a file that is half written.
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(encode_completions(unsent))
        unfinished.replace(path)
        log.error("%d completions could not be sent and are in %s.", len(unsent), path)

    def _send_spooled(self) -> None:
        for path in sorted(self._spool.glob("*.frame")):
            try:
                completions, malformed = decode_completions(path.read_bytes())
            except (OSError, MalformedMessage) as error:
                log.error("The spooled completions in %s cannot be read: %s", path, error)
                continue
            unsent = self._send(completions)
            if unsent:
                # Those that were sent are sent again with the others, which changes nothing.
                log.error("%d completions still wait in %s.", len(unsent), path)
                continue
            try:
                if malformed:
                    log.error("%d completions in %s cannot be read.", len(malformed), path)
                    path.rename(path.with_suffix(".unreadable"))
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                log.error("%s was sent and cannot be removed: %s", path, error)
            log.info("%d spooled completions were sent.", len(completions))


def _bodies_size(completion: Completion) -> int:
    return len(completion.body) + len(completion.tokens)


def _take_part(batch: list[Completion]) -> list[Completion]:
    """Remove and return the first completions that fit into one message."""
    part = [batch.pop(0)]
    size = _bodies_size(part[0])
    while batch and size + _bodies_size(batch[0]) <= _MOST_BYTES:
        completion = batch.pop(0)
        size += _bodies_size(completion)
        part.append(completion)
    return part


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
