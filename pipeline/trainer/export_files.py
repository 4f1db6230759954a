"""The files of an export, JSON Lines and Parquet: complete before they replace the target.

Used by `export.py` and the adapters that write files. Must not: know the store.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pipeline.contract.errors import InputError
from pipeline.contract.trajectory import dump_json
from pipeline.trainer.extras import require_extra

Format = Literal["jsonl", "parquet"]

#: Version of the lines' shape, kept in the metadata of Parquet files.
EXPORT_SCHEMA = 3
STDOUT = Path("-")
E_OUTPUT = "E109"

#: The columns of a line and their types, the same in both formats; docs/operate.md explains
#: them. Columns without fixed fields are `json`: an object in JSON Lines, its text in
#: Parquet. Any value may be null.
COLUMNS = {
    "run": "string",
    "rollout_id": "string",
    "label": "string",
    "group_id": "string",
    "group": "int64",
    "index": "int64",
    "prompt_id": "string",
    "dataset": "string",
    "split": "string",
    "epoch": "int64",
    "row": "int64",
    "state": "string",
    "reward": "float64",
    "rewards": "rewards",
    "stop_reason": "string",
    "final_answer": "string",
    "error": "error",
    "error_class": "string",
    "error_code": "string",
    "error_message": "string",
    "error_phase": "string",
    "attempts": "int64",
    "attempt_no": "int64",
    "n_turns": "int64",
    "model": "string",
    "endpoint": "string",
    "tokens": "tokens",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "policy_version": "versions",
    "version_min": "int64",
    "version_max": "int64",
    "latency_s": "float64",
    "finished_at": "time",
    "prompt": "json",
    "messages": "json",
    "tools": "json",
    "diff": "string",
    "tests": "json",
    "metadata": "json",
    "unreadable": "string",
}
#: Fields of the columns that are objects; `rewards` is a list of them.
FIELDS = {
    "rewards": {
        "name": "string",
        "version": "string",
        "value": "float64",
        "weight": "float64",
        "status": "string",
        "error_class": "string",
        "latency_ms": "float64",
    },
    "error": {"class": "string", "code": "string", "message": "string", "phase": "string"},
    "tokens": {"prompt": "int64", "completion": "int64"},
    "versions": {"min": "int64", "max": "int64"},
}

# A row group is written when it has this number of rows, or this number of characters of JSON, so
# that long conversations do not fill the memory.
_PARQUET_ROWS = 1000
_PARQUET_CHARS = 32 * 1024 * 1024


def require_format(to: Format) -> None:
    """Check that a format can be written here.

    Raises:
        MissingExtra: Its package is not installed.
    """
    if to == "parquet":
        require_extra("pyarrow", "parquet", use="Parquet files need")


def open_writer(file: BinaryIO, to: Format, *, run: str) -> _JsonLines | _Parquet:
    """Return a writer of this format; its `close` leaves the file open."""
    return _Parquet(file, run) if to == "parquet" else _JsonLines(file)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when it is complete."""
    if path == STDOUT:
        yield sys.stdout.buffer
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise unwritable(path, error) from error
        raise


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the error of an output file that cannot be written."""
    return InputError(
        f"{path} cannot be written.",
        why=f"{error.strerror or error}.",
        remedy="Choose another place with -o.",
        code=E_OUTPUT,
    )


class _JsonLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(dump_json(line) + b"\n")

    def close(self) -> None:
        self._file.flush()


class _Parquet:
    """Typed columns; `json` columns are text."""

    def __init__(self, file: BinaryIO, run: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._pa = pa
        self._schema = arrow_schema(COLUMNS, export_schema=str(EXPORT_SCHEMA), run=run)
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._chars = 0

    def write(self, line: dict[str, Any]) -> None:
        row = {name: _arrow_value(line.get(name), kind) for name, kind in COLUMNS.items()}
        self._rows.append(row)
        self._chars += sum(len(row[name] or "") for name in _TEXTS)
        if len(self._rows) >= _PARQUET_ROWS or self._chars >= _PARQUET_CHARS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []
            self._chars = 0


_TEXTS = ["diff", *(name for name, kind in COLUMNS.items() if kind == "json")]


def arrow_schema(columns: Mapping[str, str], **metadata: str) -> Any:
    """Return the `pyarrow.Schema` of columns; their kinds are those of `COLUMNS`, or `list of …`.

    Args:
        columns: The kind of each column, by name.
        metadata: Values that a file keeps, each as `rollout.NAME`.
    """
    import pyarrow as pa

    return pa.schema(
        [(name, _arrow_type(kind)) for name, kind in columns.items()],
        metadata={f"rollout.{name}": value for name, value in metadata.items()},
    )


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    if kind.startswith("list of "):
        return pa.list_(_arrow_type(kind.removeprefix("list of ")))
    if kind in FIELDS:
        fields = pa.struct([(name, _arrow_type(each)) for name, each in FIELDS[kind].items()])
        return pa.list_(fields) if kind == "rewards" else fields
    if kind == "time":
        return pa.timestamp("us", tz="UTC")
    return pa.string() if kind == "json" else getattr(pa, kind)()


def _arrow_value(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "json":
        return dump_json(value).decode()
    return datetime.fromisoformat(value) if kind == "time" else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
