"""Prompts → run, groups, rollouts: one transaction per chunk, idempotent by key.

The first chunk's transaction creates the run, so an unreadable dataset leaves no run. The command
line and callers of `rollout.enqueue` use this module. Enqueueing the same dataset again under the
same run adds nothing; after a crash in the middle it adds the missing prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import InputError
from pipeline.contract.names import check_name
from pipeline.contract.run import RunConfig, RunOrigin, check_slug
from pipeline.store.engine import transact
from pipeline.store.prompts import PromptSource, add_prompts, count_prompts, seal_run
from pipeline.store.runs import Run, create_run
from producers.datasets import Prompt

E_RUN_NAME = "E122"

CHUNK = 2000


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """The run's numbers of prompts and rollouts, and the number of new prompts."""

    run: Run
    prompts: int
    rollouts: int
    added: int


def enqueue(
    engine: Engine,
    *,
    run: str,
    config: RunConfig,
    source: PromptSource,
    prompts: Iterable[Prompt],
    origin: RunOrigin | None = None,
) -> EnqueueReport:
    """Enqueue prompts for rollout; memory use does not depend on their number.

    Args:
        engine: The trajectory store.
        run: Slug of the run. A new run is created; an existing one must have the same config.
        config: The run's configuration.
        source: Dataset, split and epoch, which with the row number make a prompt's identity.
        prompts: Read lazily.
        origin: The origin of a new run, stored with it.

    Raises:
        InputError: The slug cannot name a run, the name of dataset or split is too long, or a
            prompt cannot be read. Chunks before that prompt are enqueued, and another call goes on
            from there. If the first chunk fails, there is no run.
        NotAllowed: The run exists with another configuration, or a row has changed.
    """
    try:
        check_slug(run)
    except ValueError as error:
        raise InputError(str(error), code=E_RUN_NAME) from error
    try:
        check_name(source.dataset, "dataset")
        check_name(source.split, "split")
    except ValueError as error:
        raise InputError(str(error)) from error
    chunks = _chunks(prompts)
    first = next(chunks, [])

    def begin(connection: Connection) -> tuple[Run, int]:
        created = create_run(connection, run, config, origin=origin)
        return created, add_prompts(connection, created, source, first)

    stored, added = transact(engine, begin)
    for rows in chunks:
        added += transact(engine, add_prompts, stored, source, rows)
    transact(engine, seal_run, stored)
    total = transact(engine, count_prompts, stored)
    return EnqueueReport(
        stored, prompts=total, rollouts=total * config.rollouts_per_prompt, added=added
    )


def _chunks(prompts: Iterable[Prompt]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    rows = ((prompt.row_no, prompt.payload) for prompt in prompts)
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
