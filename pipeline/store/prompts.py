"""Prompts are added to the store in chunks, each row once, with their groups and rollouts.

Used by `producers/enqueue.py` and the trainer client. One chunk is one transaction: COPY
into a staging table, then one statement that adds the new rows. Must not: read datasets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, text

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.rollout import group_id_of, prompt_id_of, rollout_id_of
from pipeline.store.engine import WORK_CHANNEL, notify
from pipeline.store.runs import Run, lock_run, require_not_cancelled


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The dataset that prompts come from; part of their identity."""

    dataset: str
    split: str = "train"
    epoch: int = 0


_STAGING = text("""
CREATE TEMPORARY TABLE IF NOT EXISTS staged_prompts (
    row_no bigint, prompt_id uuid, group_id uuid, rollout_ids uuid[], payload jsonb, digest bytea
) ON COMMIT DELETE ROWS
""")

# Rows are compared by their number and not by id, because runs of earlier versions have other ids.
# OFFSET 0 keeps this an index look-up for each row, also while the tables have no statistics.
_CHANGED = text("""
SELECT s.row_no FROM staged_prompts s CROSS JOIN LATERAL (
    SELECT p.payload_digest FROM prompts p
    WHERE p.run_id = :run_id AND p.dataset = :dataset AND p.split = :split AND p.epoch = :epoch
      AND p.row_no = s.row_no OFFSET 0) AS known
WHERE known.payload_digest <> s.digest ORDER BY s.row_no LIMIT 1
""")

_ADD = text("""
WITH added AS (
    INSERT INTO prompts (prompt_id, run_id, dataset, split, epoch, row_no, payload, payload_digest)
    SELECT prompt_id, :run_id, :dataset, :split, :epoch, row_no, payload, digest
    FROM staged_prompts
    ON CONFLICT DO NOTHING
    RETURNING prompt_id
), numbered AS (
    SELECT s.prompt_id, s.group_id, s.rollout_ids,
           CAST(:next_group_no + row_number() OVER (ORDER BY s.row_no) - 1 AS integer) AS group_no
    FROM staged_prompts s JOIN added USING (prompt_id)
), new_groups AS (
    INSERT INTO groups (group_id, run_id, prompt_id, group_no, n_target, n_rollouts, n_min,
                        priority)
    SELECT group_id, :run_id, prompt_id, group_no, :n, :n_rollouts, :n_min, :priority
    FROM numbered
), new_rollouts AS (
    INSERT INTO rollouts (rollout_id, group_id, run_id, group_no, rollout_index)
    SELECT r.id, group_id, :run_id, group_no, r.number - 1
    FROM numbered, unnest(rollout_ids) WITH ORDINALITY AS r (id, number)
)
SELECT count(*) FROM added
""")

_ADVANCE = text("""
UPDATE runs SET next_group_no = next_group_no + :added, sealed_at = NULL WHERE run_id = :run_id
""")

_SEAL = text("UPDATE runs SET sealed_at = now() WHERE run_id = :run_id AND sealed_at IS NULL")

_NEXT_GROUP = text("SELECT next_group_no FROM runs WHERE run_id = :run_id")

# A prompt that was enqueued afresh has several groups.
_COUNT = text("SELECT count(*) FROM prompts WHERE run_id = :run_id")


def add_prompts(
    connection: Connection,
    run: Run,
    source: PromptSource,
    rows: Sequence[tuple[int, dict[str, Any]]],
) -> int:
    """Add prompts with a group of n queued rollouts each; return how many were new.

    Args:
        connection: An open transaction; the caller commits.
        run: The run of the prompts.
        source: The dataset of the rows.
        rows: `(row_no, payload)` pairs; a row that the store has already is skipped.

    Raises:
        InputError: A row number occurs twice among the rows.
        NotAllowed: The run is cancelled, or the store has a row with another payload; nothing of
            the chunk is added.
    """
    if not rows:
        return 0
    _require_distinct(source, rows)
    # Serialises the producers of one run, whose group numbers have no gaps, with its cancellation.
    require_not_cancelled(lock_run(connection, run))
    next_group_no = connection.execute(_NEXT_GROUP, {"run_id": run.run_id}).scalar_one()
    _stage(connection, run, source, rows)
    dataset = {"run_id": run.run_id, **asdict(source)}
    changed = connection.execute(_CHANGED, dataset).scalar_one_or_none()
    if changed is not None:
        raise NotAllowed(
            f"Row {changed} of dataset {source.dataset} differs from the row in run {run.slug}.",
            why="The dataset was changed after it was enqueued.",
            remedy="Enqueue it under another run, or under another dataset name or epoch.",
        )
    values = dataset | new_group_values(run) | {"next_group_no": next_group_no}
    added = connection.execute(_ADD, values).scalar_one()
    if added:
        connection.execute(_ADVANCE, {"added": added, "run_id": run.run_id})
        notify(connection, WORK_CHANNEL)
    return added


def new_group_values(run: Run) -> dict[str, Any]:
    """Return the parameters that each new group of a run gets from its configuration."""
    config = run.config
    return {
        "n": config.n,
        "n_rollouts": config.rollouts_per_prompt,
        "n_min": config.usable_min,
        "priority": config.priority,
    }


def seal_run(connection: Connection, run: Run) -> None:
    """Record that no more prompts are announced: the run is finished when its rollouts are."""
    connection.execute(_SEAL, {"run_id": run.run_id})


def count_prompts(connection: Connection, run: Run) -> int:
    """Return how many prompts the run has."""
    return connection.execute(_COUNT, {"run_id": run.run_id}).scalar_one()


def _require_distinct(source: PromptSource, rows: Sequence[tuple[int, dict[str, Any]]]) -> None:
    seen: set[int] = set()
    for row_no, _ in rows:
        if row_no in seen:
            raise InputError(
                f"Row {row_no} of dataset {source.dataset} occurs twice.",
                why="The row number is a prompt's identity within its dataset.",
                remedy="Number the rows, for instance from 0.",
                code="E116",
            )
        seen.add(row_no)


def _stage(
    connection: Connection,
    run: Run,
    source: PromptSource,
    rows: Sequence[tuple[int, dict[str, Any]]],
) -> None:
    connection.execute(_STAGING)
    cursor = connection.connection.cursor()
    with cursor.copy("COPY staged_prompts FROM STDIN") as copy:  # pyright: ignore[reportAttributeAccessIssue]
        for row_no, payload in rows:
            prompt_id = prompt_id_of(run.run_id, source.dataset, source.split, source.epoch, row_no)
            body = orjson.dumps(payload)
            ids = ",".join(
                str(rollout_id_of(prompt_id, index))
                for index in range(run.config.rollouts_per_prompt)
            )
            digest = hashlib.sha256(orjson.dumps(payload, option=orjson.OPT_SORT_KEYS)).digest()
            copy.write_row(
                (
                    row_no,
                    str(prompt_id),
                    str(group_id_of(prompt_id)),
                    "{" + ids + "}",
                    body.decode(),
                    "\\x" + digest[:16].hex(),
                )
            )
