"""The files of an export: JSON Lines and Parquet, put in their place when they are whole.

Used by `export.py`. Must not: know the store.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from pipeline.contract.errors import ConfigError, InputError
from pipeline.contract.trajectory import dump_json

Format = Literal["jsonl", "parquet"]

#: Version of the lines' shape, kept in the metadata of Parquet files.
EXPORT_SCHEMA = 1
STDOUT = Path("-")
E_OUTPUT = "E109"

_PARQUET_ROWS = 1000
_ERROR_FIELDS = ("class", "code", "message", "phase")
_JSON_FIELDS = ("prompt", "messages", "tools")


class Writer(Protocol):
    """Takes the lines of an export."""

    def write(self, line: dict[str, Any]) -> None:
        """Write a line."""
        ...

    def close(self) -> None:
        """Write what is left; the file stays open."""
        ...


def require_format(to: Format) -> None:
    """Check that a format can be written here.

    Raises:
        ConfigError: Its package is not installed.
    """
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "Parquet files need the package pyarrow.",
            remedy='pip install "rollout-pipeline[parquet]"',
            code="E112",
        )


def open_writer(file: BinaryIO, to: Format, *, run: str) -> Writer:
    """Return a writer of this format."""
    return _Parquet(file, run) if to == "parquet" else _JsonLines(file)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when all of it is written."""
    if path == STDOUT:
        yield sys.stdout.buffer
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise _unwritable(path, error) from error
        raise


class _JsonLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(dump_json(line) + b"\n")

    def close(self) -> None:
        self._file.flush()


class _Parquet:
    """Flat typed columns; what has no fixed shape is JSON text."""

    def __init__(self, file: BinaryIO, run: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._pa = pa
        self._schema = pa.schema(
            [
                *((name, pa.string()) for name in ("rollout_id", "label", "run", "group_id")),
                ("group", pa.int64()),
                ("index", pa.int32()),
                ("state", pa.string()),
                ("reward", pa.float64()),
                ("stop_reason", pa.string()),
                *((f"error_{name}", pa.string()) for name in _ERROR_FIELDS),
                *((name, pa.int32()) for name in ("attempts", "attempt_no", "n_turns")),
                ("prompt_tokens", pa.int64()),
                ("completion_tokens", pa.int64()),
                ("version_min", pa.int64()),
                ("version_max", pa.int64()),
                *((name, pa.string()) for name in ("finished_at", *_JSON_FIELDS)),
                ("unreadable", pa.string()),
            ],
            metadata={"rollout.export_schema": str(EXPORT_SCHEMA), "rollout.run": run},
        )
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def write(self, line: dict[str, Any]) -> None:
        self._rows.append(_flat(line))
        if len(self._rows) >= _PARQUET_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    error = line["error"] or {}
    return {
        **line,
        **{f"error_{name}": error.get(name) for name in _ERROR_FIELDS},
        **{name: dump_json(line[name]).decode() for name in _JSON_FIELDS},
        "prompt_tokens": line["tokens"]["prompt"],
        "completion_tokens": line["tokens"]["completion"],
        "version_min": line["policy_version"]["min"],
        "version_max": line["policy_version"]["max"],
        "unreadable": line.get("unreadable"),
    }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path} cannot be written.",
        why=f"{error.strerror or error}.",
        remedy="Choose another place with -o.",
        code=E_OUTPUT,
    )
