"""The stored trajectory of an attempt, as `rollout show rollout` prints it: record and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.contract.trajectory import TrajectoryRecord
from pipeline.queue.payloads import open_payloads
from pipeline.store.inspection import StoredBody
from pipeline.trainer.bodies import read_record, read_tokens
from rollout.deployment import Deployment

if TYPE_CHECKING:
    from pipeline.tokens.segments import Segments


def stored_body(found: dict[str, Any], attempt: int | None) -> StoredBody | None:
    """Return the body of an attempt; attempt None: of the winner, else of the last one."""
    wanted = attempt or found["winner_attempt_no"]
    stored = [
        each["trajectory"]
        for each in found["attempts"]
        if each["trajectory"] is not None and wanted in (None, each["attempt_no"])
    ]
    return stored[-1] if stored else None


def record_of(deployment: Deployment, stored: StoredBody | None) -> TrajectoryRecord | None:
    """Read the conversation of a stored body."""
    return read_record(stored, open_payloads(deployment.settings)) if stored else None


def segments_of(deployment: Deployment, stored: StoredBody | None) -> Segments:
    """Read the tokens of a stored body, merged as a trainer gets them."""
    # These modules load numpy, which no other output needs.
    from pipeline.tokens.segments import merge_calls
    from pipeline.tokens.token_body import unpack_tokens

    body = read_tokens(stored, open_payloads(deployment.settings)) if stored else b""
    return merge_calls(unpack_tokens(body))
