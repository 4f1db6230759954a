"""The stored trajectory of an attempt, as `rollout show rollout` prints it: record and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.contract.trajectory import TrajectoryRecord
from pipeline.queue.payloads import open_payloads
from pipeline.store.stored_bodies import StoredBody
from pipeline.trainer.bodies import read_record, read_tokens
from rollout.deployment import Deployment

if TYPE_CHECKING:
    from pipeline.tokens.segments import Segments


def take_body(found: dict[str, Any], attempt: int | None) -> StoredBody | None:
    """Remove the bodies from a rollout's attempts, and return one of them.

    Args:
        found: The rollout, as `read_rollout` returns it.
        attempt: Its attempt; None: the winner, or without a winner the last one with a body.
    """
    wanted = attempt or found["winner_attempt_no"]
    bodies = {each["attempt_no"]: each.pop("trajectory") for each in found["attempts"]}
    stored = [body for number, body in bodies.items() if body and wanted in (None, number)]
    return stored[-1] if stored else None


def record_of(deployment: Deployment, body: StoredBody | None) -> TrajectoryRecord | None:
    """Read the conversation of a stored body."""
    return read_record(body, open_payloads(deployment.settings)) if body else None


def segments_of(deployment: Deployment, body: StoredBody | None) -> Segments:
    """Read the tokens of a stored body, merged as a trainer gets them."""
    # These modules load numpy, which no other output needs.
    from pipeline.tokens.segments import merge_calls
    from pipeline.tokens.token_body import unpack_tokens

    packed = read_tokens(body, open_payloads(deployment.settings)) if body else b""
    return merge_calls(unpack_tokens(packed))
