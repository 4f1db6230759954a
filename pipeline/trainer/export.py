"""Rollouts as files: JSON Lines or Parquet, one rollout a line, failed ones with their error.

Used by `rollout export` and by trainers that read files. Streams, group after group, in flat
memory. Must not: lease or commit anything.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from pipeline.contract.messages import storable
from pipeline.contract.rollout import rollout_label_of
from pipeline.queue.payloads import PayloadStore
from pipeline.store.engine import transact
from pipeline.store.exported_rollouts import read_exported
from pipeline.store.runs import Run
from pipeline.trainer.bodies import try_read_record
from pipeline.trainer.export_files import (
    COLUMNS,
    FIELDS,
    Format,
    open_writer,
    output_file,
    require_format,
)
from pipeline.trainer.stored_groups import group_ranges

_TERMINAL = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(slots=True)
class ExportReport:
    """Counts of an export."""

    rollouts: int = 0
    failed: int = 0
    unfinished: int = 0  #: rollouts that are not terminal; they are left out
    unreadable: int = 0  #: trajectories that are gone or damaged; the line has the reason


def export_run(
    engine: Engine, run: Run, path: Path, *, to: Format, payloads: PayloadStore
) -> ExportReport:
    """Write the terminal rollouts of a run, in order of group and index.

    Args:
        engine: The trajectory store.
        run: Which run.
        path: Replaced as a whole at the end; `-` is stdout (JSON Lines only).
        to: Which format.
        payloads: The payload store, for bodies that are not in the database.

    Raises:
        InputError: The file cannot be written.
        MissingExtra: The package for the format is not installed.
    """
    report = ExportReport()
    require_format(to)
    with output_file(path) as file:
        writer = open_writer(file, to, run=run.slug)
        for line in export_lines(engine, run, payloads=payloads, report=report):
            writer.write(line)
        writer.close()
    return report


def export_lines(
    engine: Engine, run: Run, *, payloads: PayloadStore, report: ExportReport | None = None
) -> Generator[dict[str, Any], None, None]:
    """Yield one plain dict for each terminal rollout; `report` is kept up to date.

    No transaction is open while the caller has a line or the payload store is read.
    """
    report = report if report is not None else ExportReport()
    for first, end in group_ranges(engine, run):
        for row in transact(engine, read_exported, run.run_id, first, end):
            if row.state in _TERMINAL:
                yield _line(run, row, payloads, report)
            else:
                report.unfinished += 1


def _line(run: Run, row: Any, payloads: PayloadStore, report: ExportReport) -> dict[str, Any]:
    record, unreadable = try_read_record(row, payloads)
    report.rollouts += 1
    report.failed += row.state == "failed"
    if unreadable is not None:
        report.unreadable += 1
    call = record.calls[-1] if record and record.calls else None
    metadata = dict(record.metadata) if record else {}
    diff, tests = metadata.pop("diff", None), metadata.pop("tests", None)
    columns: dict[str, Any] = row._asdict()
    columns |= {
        "run": run.slug,
        "label": rollout_label_of(run.slug, row.group, columns["index"]),
        "final_answer": storable(record.final_answer) if record else None,
        "error": None,
        "model": storable(call.model or run.config.model or "") or None if call else None,
        "endpoint": call.endpoint if call else None,
        "tokens": {"prompt": row.prompt_tokens, "completion": row.completion_tokens},
        "policy_version": {"min": row.version_min, "max": row.version_max},
        "finished_at": None if row.finished_at is None else row.finished_at.isoformat(),
        "messages": record.messages if record else [],
        "tools": record.tools if record else {},
        "diff": storable(diff) if isinstance(diff, str) else None,
        "tests": tests,
        "metadata": metadata,
        "unreadable": None if unreadable is None else str(unreadable),
    }
    error = {name: columns[f"error_{name}"] for name in FIELDS["error"]}
    if row.error_class is None:
        columns |= {f"error_{name}": None for name in error}
    else:
        columns["error"] = error
    return {name: columns[name] for name in COLUMNS}
