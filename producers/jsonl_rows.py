"""Rows of JSON Lines files, plain or gzipped, in bounded memory for lines of any length.

`datasets.py` calls it. A bad line becomes a `BadRow` that names file, line and column. A file that
cannot be read to its end raises an `InputError`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.contract.errors import InputError
from producers.rows import (
    E_ENCODING,
    E_ROW,
    E_SOURCE,
    E_TOO_LONG,
    BadRow,
    Row,
    preview,
)

CHUNK_BYTES = 1 << 20
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class _BadLine(ValueError):
    """A line is not a row; becomes a `BadRow`."""

    def __init__(self, code: str, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.remedy = remedy


def read_jsonl(path: Path, *, max_line_bytes: int) -> Iterator[Row | BadRow]:
    """Yield a row for each line that is not blank; `row_no` is the line number minus one."""
    for line_no, offset, line in _lines(path, max_line_bytes):
        location = f"{path}:{line_no}"
        try:
            columns = _columns(line, offset, max_line_bytes)
        except _BadLine as bad:
            yield BadRow(line_no - 1, location, bad.code, str(bad), bad.remedy, preview(line))
        else:
            yield Row(line_no - 1, location, columns)


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number, byte offset, line); lines beyond the limit are truncated."""
    line_no, offset = 0, 0
    with _opened(path) as stream:
        while True:
            with _read_errors(path, line_no):
                line = stream.readline(max_line_bytes + 2)
                size = len(line)
                if size > max_line_bytes and not line.endswith(b"\n"):
                    size += _skip_line(stream)
            if not line:
                return
            line_no += 1
            body = line.removeprefix(_UTF8_BOM) if line_no == 1 else line
            if body.strip():
                yield line_no, offset, body
            offset += size


def _skip_line(stream: BinaryIO) -> int:
    skipped = 0
    while chunk := stream.readline(CHUNK_BYTES):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _columns(line: bytes, offset: int, max_line_bytes: int) -> dict[str, Any]:
    line = line.rstrip(b"\r\n")
    if len(line) > max_line_bytes:
        raise _BadLine(E_TOO_LONG, f"the line is longer than {max_line_bytes:,} bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _wrong_encoding(line, offset, error) from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise _malformed(text, error) from error
    except RecursionError as error:
        raise _BadLine(E_ROW, "malformed JSON: nested too deeply") from error
    except ValueError as error:  # from the hooks, or from a number with thousands of digits
        raise _BadLine(E_ROW, f"malformed JSON: {error}") from error
    if not isinstance(value, dict):
        raise _not_an_object(text, value)
    return value


def _malformed(text: str, error: json.JSONDecodeError) -> _BadLine:
    remedy = ""
    if text.strip() in ("{", "["):
        remedy = "One document over many lines? Write one object a line: jq -c '.[]? // .' FILE."
    message = error.msg.removesuffix(" at").removesuffix(" starting")
    return _BadLine(E_ROW, f"malformed JSON at column {error.colno}: {message}", remedy)


def _not_an_object(text: str, value: object) -> _BadLine:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    kind = kinds.get(type(value), "a number")
    remedy = "Write one object a line: jq -c '.[]' FILE." if isinstance(value, list) else ""
    return _BadLine(E_ROW, f"the line is {kind}, not a JSON object", remedy)


def _wrong_encoding(line: bytes, offset: int, error: UnicodeDecodeError) -> _BadLine:
    reason = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {offset + error.start} of the file"
    guess = "UTF-16" if line.startswith(_UTF16_BOMS) else "WINDOWS-1252"
    return _BadLine(
        E_ENCODING,
        f"{reason} (line byte {error.start + 1})",
        f"If it is {guess}: iconv -f {guess} -t UTF-8 FILE > NEW.",
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {json.dumps(twice)} is given twice in one object")
    return found


def _constant(name: str) -> float:
    return float(name)  # NaN and infinities; `storable` handles them later


def _opened(path: Path) -> BinaryIO:
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        return path.open("rb", buffering=CHUNK_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


@contextmanager
def _read_errors(path: Path, line_no: int | None = None) -> Iterator[None]:
    """Turn errors of the archive or the disk into one that says how far reading got."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        progress = "" if line_no is None else f" after line {line_no}"
        raise _unreadable(path, f"{error}{progress}") from error


def _unreadable(path: Path, why: str) -> InputError:
    """Return the error for an existing file that cannot be read."""
    return InputError(f"{path} cannot be read.", why=f"{why}.", code=E_SOURCE)
