"""Prompts → run, groups, rollouts: one transaction per chunk, idempotent by key.

The run is created together with its first chunk: a dataset that cannot be read leaves no run.
Used by the command line, the trainer client and examples. Enqueueing the same dataset under the
same run again adds nothing; after a crash in the middle it adds what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import InputError
from pipeline.contract.run import RunConfig, RunOrigin, check_slug
from pipeline.store.engine import transact
from pipeline.store.prompts import PromptSource, add_prompts, count_prompts, seal_run
from pipeline.store.runs import Run, create_run
from producers.datasets import Prompt

E_RUN_NAME = "E122"

CHUNK = 2000


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """What a run has now, and how many prompts of it are new."""

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
    """Enqueue prompts for rollout; memory stays flat however many there are.

    Args:
        engine: The trajectory store.
        run: Slug of the run; it is created, or added to if it asks for the same thing.
        config: What the run asks for.
        source: Dataset, split and epoch, which with the row number make a prompt's identity.
        prompts: Read lazily.
        origin: Where the run comes from; kept when it is created.

    Raises:
        InputError: The slug cannot name a run, or a prompt cannot be read. Chunks before it are
            enqueued, and enqueueing again goes on from there; without any there is no run.
        NotAllowed: The run exists and asks for something else, or a row has changed.
    """
    try:
        check_slug(run)
    except ValueError as error:
        raise InputError(str(error), code=E_RUN_NAME) from error
    chunks = _chunks(prompts)
    first = next(chunks, [])

    def begin(connection: Connection) -> tuple[Run, int]:
        created = create_run(connection, run, config, origin=origin)
        return created, add_prompts(connection, created, source, first)

    stored, added = transact(engine, begin)
    for rows in chunks:
        added += transact(
            engine, lambda connection, rows=rows: add_prompts(connection, stored, source, rows)
        )
    transact(engine, lambda connection: seal_run(connection, stored))
    total = transact(engine, lambda connection: count_prompts(connection, stored))
    return EnqueueReport(
        stored, prompts=total, rollouts=total * config.rollouts_per_prompt, added=added
    )


def _chunks(prompts: Iterable[Prompt]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    rows = ((prompt.row_no, prompt.payload) for prompt in prompts)
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
