"""Rows of Parquet files, read in batches; the extra `parquet` is required.

`datasets.py` calls it. Must not: hold more than a few hundred rows in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.contract.errors import InputError
from producers.rows import E_EXTRA, E_SOURCE, Row

BATCH_ROWS = 256


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows in file order."""
    row_no = 0
    with _opened(path) as file:
        try:
            # Pre-buffering would load whole row groups, which may be the whole file.
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for columns in batch.to_pylist():
                    yield Row(row_no, f"{path} row {row_no + 1}", columns)
                    row_no += 1
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise _damaged(path, error, f" after row {row_no}") from error


def _opened(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path} is a Parquet file, and no Parquet reader is installed.",
            remedy='pip install "rollout-pipeline[parquet]"',
            code=E_EXTRA,
        ) from error
    try:
        return parquet.ParquetFile(path, pre_buffer=False)
    except (OSError, ValueError) as error:
        raise _damaged(path, error, "") from error


def _damaged(path: Path, error: Exception, progress: str) -> InputError:
    return InputError(f"{path} cannot be read as Parquet{progress}.", why=str(error), code=E_SOURCE)
