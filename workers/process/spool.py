"""The spool: a folder of completions that a worker could not send before it ended.

The outbox writes it at its end, and sends its files at the start of the next worker. Must not: send
anything itself, or delete a file that was not sent.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from pathlib import Path

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.messages import Completion
from pipeline.queue.frames import decode_completions, encode_completions

log = logging.getLogger(__name__)


class Spool:
    """The files below a folder, each with the completions of one part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, unsent: list[Completion]) -> None:
        """Write completions to a file of their own."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{unsent[0].label}-{len(unsent)}-{uuid.uuid4().hex[:12]}.frame"
        # Another worker that starts here must not read a file that is half written.
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(encode_completions(unsent))
        unfinished.replace(path)
        log.error("%d completions could not be sent and are in %s.", len(unsent), path)

    def send_all(self, send: Callable[[list[Completion]], list[Completion]]) -> None:
        """Send each file by `send`, which returns the unsent completions; remove the sent files."""
        for path in sorted(self._folder.glob("*.frame")):
            try:
                completions, malformed = decode_completions(path.read_bytes())
            except (OSError, MalformedMessage) as error:
                log.error("The spooled completions in %s cannot be read: %s", path, error)
                continue
            if unsent := send(completions):
                # The file stays whole: a second delivery of its sent completions changes nothing.
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
