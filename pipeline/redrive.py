"""Dead letters tried again: rollouts are queued, completions recorded, groups made ready.

Used by `rollout dlq requeue`. Must not: change a letter, except to mark it as tried again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import MalformedMessage, NotAllowed, PipelineError
from pipeline.contract.rollout import RolloutState
from pipeline.queue.frames import decode_completions
from pipeline.store.dead_letters import DeadLetter, get_dead_letter, mark_redriven
from pipeline.store.dropped_groups import restore_group
from pipeline.store.engine import transact
from pipeline.store.inspection import find_group
from pipeline.store.operations import retry_rollouts
from pipeline.store.outcomes import record_outcomes
from pipeline.store.rescores import record_rescores
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.runs import get_run


def redrive_all(engine: Engine, letters: Sequence[DeadLetter]) -> list[str]:
    """Try dead letters again, each in its own transaction; return the result of each as text.

    Raises:
        PipelineError: There is one letter, and it was not tried; of several letters such an error
            is a result.
    """
    results: list[str] = []
    for letter in letters:
        try:
            results.append(transact(engine, redrive, letter.dead_letter_id))
        except PipelineError as error:
            if len(letters) == 1:
                raise
            results.append(f"not this time: {error}")
    return results


def redrive(connection: Connection, dead_letter_id: int) -> str:
    """Try a dead letter again and return the result in words; the caller commits.

    Raises:
        MalformedMessage: The message still cannot be decoded.
        NotFound: No dead letter has this number.
        NotAllowed: The kind of the letter or the state of its rollout leaves nothing to try again.
    """
    letter = get_dead_letter(connection, dead_letter_id)
    match letter.kind:
        case "rollout":
            result = _retry_rollout(connection, letter)
        case "completion":
            result = _record_completion(connection, letter)
        case "group":
            result = _restore_group(connection, letter)
        case _:
            raise NotAllowed(
                f"Dead letter {dead_letter_id} is a {letter.kind}: there is nothing to try again.",
                why="Its content is outdated, or it is not a message of this pipeline.",
                remedy=f"Drop it: rollout dlq drop {dead_letter_id}",
            )
    mark_redriven(connection, dead_letter_id)
    return result


def _retry_rollout(connection: Connection, letter: DeadLetter) -> str:
    assert letter.run is not None
    run = get_run(connection, letter.run)
    where = RolloutFilter("r.rollout_id = :dead_rollout", {"dead_rollout": letter.rollout_id})
    count = retry_rollouts(connection, run, where, state=RolloutState.FAILED)
    if not count.allowed:
        raise NotAllowed(
            f"Rollout {letter.label} is not queued again.",
            why="It is no longer failed, or its group went on without it.",
            remedy=f"Drop its letter: rollout dlq drop {letter.dead_letter_id}",
        )
    return "queued again"


def _restore_group(connection: Connection, letter: DeadLetter) -> str:
    assert letter.label is not None
    if not restore_group(connection, find_group(connection, letter.label)):
        raise NotAllowed(
            f"Group {letter.label} is not made ready again.",
            why="It is no longer dropped, or for another reason.",
            remedy=f"Drop its letter: rollout dlq drop {letter.dead_letter_id}",
        )
    return "ready again"


def _record_completion(connection: Connection, letter: DeadLetter) -> str:
    good, bad = decode_completions(letter.body or b"")
    if bad:
        raise MalformedMessage(f"Dead letter {letter.dead_letter_id}: {bad[0].reason}")
    report = record_outcomes(connection, [c for c in good if c.purpose == "attempt"])
    unknown = record_rescores(connection, [c for c in good if c.purpose == "rescore"])
    if report.unknown or unknown:
        raise NotAllowed(
            f"Dead letter {letter.dead_letter_id} is of an attempt that this store never "
            "dispatched.",
            remedy=f"Drop it: rollout dlq drop {letter.dead_letter_id}",
        )
    if report.duplicate:
        return "known already"
    return "came too late, kept for audit" if report.superseded else "recorded"
