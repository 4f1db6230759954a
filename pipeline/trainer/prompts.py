"""Prompts that a trainer enqueues as it goes, and open groups that it cancels.

Used by the trainer client. Must not: decide which prompts are worth it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import InputError
from pipeline.contract.names import check_name
from pipeline.contract.rollout import group_id_of, prompt_id_of
from pipeline.store.engine import transact
from pipeline.store.operations import cancel_rollouts
from pipeline.store.policies import groups_begun_before
from pipeline.store.prompts import PromptSource, add_prompts, seal_run
from pipeline.store.runs import Run

#: The split of prompts from a trainer; the idempotency key takes the place of the dataset.
_SPLIT = "trainer"


def enqueue_prompts(
    engine: Engine, run: Run, prompts: Iterable[str | Mapping[str, Any]], *, key: str
) -> list[UUID]:
    """Enqueue prompts in one transaction, once for each key; return the ids of their groups."""
    if not key:
        raise InputError("The idempotency_key is empty.", remedy="Name the prompts by their step.")
    try:
        check_name(key, "idempotency_key")
    except ValueError as error:
        raise InputError(str(error)) from error
    rows = [(row_no, _payload(prompt, row_no)) for row_no, prompt in enumerate(prompts)]
    source = PromptSource(key, _SPLIT)

    def add(connection: Connection) -> None:
        add_prompts(connection, run, source, rows)
        seal_run(connection, run)

    transact(engine, add)
    return [group_id_of(prompt_id_of(run.run_id, key, _SPLIT, 0, row_no)) for row_no, _ in rows]


def cancel_groups(
    engine: Engine,
    run: Run,
    group_ids: Iterable[UUID] | None,
    *,
    older_than_version: int | None = None,
) -> int:
    """Cancel the rollouts of open groups that are not done; return how many."""
    groups = None if group_ids is None else list(group_ids)
    if older_than_version is not None:
        begun = transact(engine, lambda c: groups_begun_before(c, run, older_than_version))
        groups = begun if groups is None else [each for each in groups if each in set(begun)]
    cancelled = 0
    while n := transact(engine, lambda c: cancel_rollouts(c, run, groups=groups)):
        cancelled += n
    return cancelled


def _payload(prompt: str | Mapping[str, Any], row_no: int) -> dict[str, Any]:
    payload = {"content": prompt} if isinstance(prompt, str) else dict(prompt)
    if not (payload.get("content") or payload.get("messages")):
        raise InputError(
            f"Prompt {row_no} has no text.",
            why="It has neither `content` nor `messages`.",
            remedy="Give a text, or a payload with one of them.",
        )
    return payload
