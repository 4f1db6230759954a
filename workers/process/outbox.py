"""The outbox: collects completions briefly, sends them together, keeps them until they are sent.

Filled by the event loop, emptied by a thread. Completions that are unsent when the worker must end
are written to a folder (the spool); the next worker that starts there sends them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path

from pipeline.contract.errors import MalformedMessage, QueueUnavailable
from pipeline.contract.messages import AttemptBeat, AttemptKey, Completion
from pipeline.queue.claim_checks import check_out
from pipeline.queue.completions import OutcomePublisher
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.payloads import PayloadStore
from workers.process.vital_threads import vital

log = logging.getLogger(__name__)

#: Long enough to gather completions that end together, short compared with any rollout.
_LINGER_S = 0.1
_MOST = 64
#: Size of the bodies that keeps a message, in base64, below the limit of SQS (256 KiB).
_MOST_BYTES = 180_000
_MAX_BACKOFF_S = 5.0
#: A completion unsent for longer than this is reported in heartbeats, so that its lease is renewed.
_AWAY_S = 1.0


class Outbox(threading.Thread):
    """Sends completions until closed, then sends the rest.

    Args:
        publisher: A connection that no other thread uses.
        payloads: The store that large bodies are written to before their message is sent.
        inline_max_bytes: Largest body that travels in a message; -1 sends none.
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
        self._queue: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._waiting_since: dict[AttemptKey, float] = {}
        self._give_up_at = float("inf")
        self._closing = threading.Event()

    def put(self, completion: Completion) -> None:
        """Take a completion; never blocks."""
        self._waiting_since[completion.key] = time.monotonic()
        self._queue.put(completion)

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
        self.join(timeout_s + 10)

    def run(self) -> None:
        """Send batches until closed."""
        with vital(self.name):
            self._run()

    def _run(self) -> None:
        self._send_spooled()
        stopping = False
        while not stopping:
            batch, stopping = self._gather()
            batch = [self._without_large_body(completion) for completion in batch]
            while batch:
                part = _take_part(batch)
                self._send(part)
        self._publisher.close()

    def _gather(self) -> tuple[list[Completion], bool]:
        first = self._queue.get()
        if first is None:
            return [], True
        batch: list[Completion] = [first]
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
        if len(completion.body) <= self._inline_max_bytes or not completion.body:
            return completion
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

    def _send(self, part: list[Completion]) -> None:
        failures = 0
        while part:
            try:
                self._publisher.send_completions(part)
                for completion in part:
                    self._waiting_since.pop(completion.key, None)
                return
            # Broad on purpose: if this thread ended, heartbeats would renew its attempts for ever.
            except Exception as error:
                if not isinstance(error, QueueUnavailable):
                    log.exception("%d completions could not be sent.", len(part))
                    part = self._encodable(part)
                failures += 1
                if time.monotonic() > self._give_up_at:
                    self._write_spool(part)
                    return
                if failures % 10 == 1:
                    log.warning(
                        "%d completions wait for the broker: %s",
                        len(part) + self._queue.qsize(),
                        error,
                    )
                time.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))

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

    def _write_spool(self, part: list[Completion]) -> None:
        self._spool.mkdir(parents=True, exist_ok=True)
        path = self._spool / f"{part[0].label}-{len(part)}.frame"
        path.write_bytes(encode_completions(part))
        log.error("%d completions could not be sent and are in %s.", len(part), path)

    def _send_spooled(self) -> None:
        for path in sorted(self._spool.glob("*.frame")):
            try:
                completions, _ = decode_completions(path.read_bytes())
            except (OSError, MalformedMessage) as error:
                log.error("The spooled completions in %s cannot be read: %s", path, error)
                continue
            self._send(completions)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.error("%s was sent and cannot be removed: %s", path, error)
            log.info("%d spooled completions were sent.", len(completions))


def _take_part(batch: list[Completion]) -> list[Completion]:
    """Remove and return the first completions that fit into one message."""
    part = [batch.pop(0)]
    size = len(part[0].body)
    while batch and size + len(batch[0].body) <= _MOST_BYTES:
        completion = batch.pop(0)
        size += len(completion.body)
        part.append(completion)
    return part
