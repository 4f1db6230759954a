"""Token rows as an Arrow table, as a Parquet file and as a Hugging Face data set.

Called with leased batches (`TrainerClient.stream`) or with stored ones (`StoredGroups`). Needs the
extra `parquet`, for data sets `datasets`. Must not: commit a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.advantages import AdvantageKind
from pipeline.tokens.rows import TokenRow
from pipeline.trainer.adapters.row_sources import row_sources
from pipeline.trainer.export_files import arrow_schema, output_file
from pipeline.trainer.extras import require_extra
from pipeline.trainer.train_batch import TrainBatch, TrainGroup, TrainRollout

#: Version of the columns, kept in the metadata of tables and files.
SEGMENT_SCHEMA = 1

#: The columns of a table and their types; docs/trainers.md explains them.
SEGMENT_COLUMNS = {
    "run": "string",
    "step": "int64",
    "group_id": "string",
    "group": "int64",
    "rollout_id": "string",
    "index": "int64",
    "segment_index": "int64",
    "reward": "float64",
    "advantage": "float64",
    "stop_reason": "string",
    "agent": "string",
    "origin": "string",
    "truncated": "bool_",
    "prompt_length": "int64",
    "token_ids": "list of int32",
    "loss_mask": "list of uint8",
    "logprobs": "list of float32",
    "versions": "list of int32",
}


@dataclass(slots=True)
class SegmentReport:
    """Counts of a file."""

    rollouts: int = 0
    rows: int = 0
    rollouts_without_rows: int = 0  #: rollouts whose model server recorded no ids


def segment_table(batch: TrainBatch, *, advantages: AdvantageKind | None = None) -> Any:
    """Return the rows of a batch as a `pyarrow.Table`, one row for each segment.

    Args:
        batch: A leased or a stored batch.
        advantages: The kind of the column `advantage`, the same for all rows of a rollout; None:
            the column is null.

    Raises:
        MissingExtra: pyarrow is not installed.
        InputError: Advantages are asked for, and a rollout has no reward.
        NotAllowed: The batch's spec refuses a rollout; see `TrainBatch.rows`.
    """
    require_extra("pyarrow", "parquet", use="Tables of segments need")
    import pyarrow as pa

    columns = _columns(batch, advantages)
    schema = _schema(batch.run)
    return pa.Table.from_arrays(
        [
            _list_array(columns[field.name], field.type)
            if pa.types.is_list(field.type)
            else pa.array(columns[field.name], field.type)
            for field in schema
        ],
        schema=schema,
    )


def write_segments(
    batches: Iterable[TrainBatch], path: Path, *, run: str, advantages: AdvantageKind | None = None
) -> SegmentReport:
    """Write the rows of batches to a Parquet file, a row group for each batch.

    Args:
        batches: Of one run; they are read one by one.
        path: Replaced as a whole at the end.
        run: The run's slug, for the file's metadata.
        advantages: As in `segment_table`.

    Raises:
        MissingExtra: pyarrow is not installed.
        InputError: The file cannot be written, or a rollout has no reward for advantages.
    """
    require_extra("pyarrow", "parquet", use="Parquet files need")
    from pyarrow.parquet import ParquetWriter

    report = SegmentReport()
    with (
        output_file(path) as file,
        ParquetWriter(file, _schema(run), compression="zstd") as writer,
    ):
        for batch in batches:
            table = segment_table(batch, advantages=advantages)
            if table.num_rows:
                writer.write_table(table)
            report.rollouts += sum(1 for _ in batch.rollouts())
            report.rows += table.num_rows
            report.rollouts_without_rows += batch.rows_missing
    return report


def segment_dataset(
    batches: Iterable[TrainBatch], *, run: str, advantages: AdvantageKind | None = None
) -> Any:
    """Return the rows of batches as a `datasets.Dataset`, held in memory.

    Args:
        batches: Of one run.
        run: The run's slug.
        advantages: As in `segment_table`.

    Raises:
        MissingExtra: datasets is not installed.
        InputError: A rollout has no reward for advantages.
    """
    require_extra("datasets", "datasets", use="Data sets need")
    import pyarrow as pa
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    tables = [segment_table(batch, advantages=advantages) for batch in batches]
    return Dataset(pa.concat_tables([_schema(run).empty_table(), *tables]))


def _columns(batch: TrainBatch, advantages: AdvantageKind | None) -> dict[str, list[Any]]:
    values = batch.advantages(advantages) if advantages is not None else {}

    def cells(row: TokenRow, group: TrainGroup, rollout: TrainRollout) -> Iterator[Any]:
        yield batch.run
        yield batch.step if batch.step >= 0 else None
        yield str(row.group_id)
        yield group.group_no
        yield str(row.rollout_id)
        yield rollout.rollout_index
        yield row.segment_index
        yield row.reward
        yield values.get(row.rollout_id)
        yield rollout.stop_reason
        yield row.agent
        yield row.origin
        yield row.truncated
        yield row.prompt_length
        yield from (row.token_ids, row.loss_mask, row.logprobs, row.versions)

    table = [list(cells(*source)) for source in row_sources(batch)]
    return {name: [line[index] for line in table] for index, name in enumerate(SEGMENT_COLUMNS)}


def _list_array(values: Sequence[np.ndarray[Any, Any]], kind: Any) -> Any:
    """Return arrays as one Arrow column, without a Python object for each token."""
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values], dtype=np.int64)])
    joined = np.concatenate([np.empty(0, kind.value_type.to_pandas_dtype()), *values])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(joined, kind.value_type), type=kind
    )


def _schema(run: str) -> Any:
    return arrow_schema(SEGMENT_COLUMNS, segment_schema=str(SEGMENT_SCHEMA), run=run)
