"""Datasets as prompts: finds the reader of a source and streams its rows in flat memory.

The command line calls this module and gives its prompts to `enqueue.py`. Every error names the
file and the line. A rejected row keeps its row number, because enqueueing the same dataset again
must give the same prompts the same identity.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import InputError
from producers.huggingface_rows import (
    PREFIX,
    is_saved_dataset,
    read_hub,
    read_saved,
)
from producers.jsonl_rows import read_jsonl
from producers.parquet_rows import read_parquet
from producers.prompt_fields import NoPrompt, make_payload
from producers.rows import (
    E_DUPLICATE,
    E_EMPTY,
    E_PROMPT,
    E_SOURCE,
    E_VALUE,
    BadRow,
    Row,
    Unstorable,
    preview,
    storable,
)

MAX_LINE_BYTES = 16 * 2**20
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
PARQUET_SUFFIXES = (".parquet", ".pq")

OnBad = Callable[[BadRow], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row to be solved; `row_no` counts from 0 and is part of its identity."""

    row_no: int
    payload: dict[str, Any]


def read_prompts(
    source: str | Path,
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    split: str = "train",
    limit: int | None = None,
    on_bad: OnBad | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Prompt]:
    """Stream the prompts of a dataset, in order.

    Args:
        source: A `.jsonl` (also gzipped) or `.parquet` file, a directory saved by Hugging Face's
            `save_to_disk`, or `hf:NAME[:CONFIG]`.
        prompt_field: Column of the prompt; default: the first of `PROMPT_FIELDS` with a value.
        answer_field: Column of the gold answer; default: the first of `ANSWER_FIELDS`, if any.
        split: Split of a Hugging Face dataset.
        limit: Highest number of good rows.
        on_bad: Called with each rejected row; without it the first one raises an error.
        max_line_bytes: Longest line, and longest text in a row of another format.

    Raises:
        InputError: The source does not exist (at once), a row is bad, or there are no rows (while
            reading).
    """
    rows = _open_rows(source, split, max_line_bytes)

    def prompts() -> Iterator[Prompt]:
        seen_ids: set[int] = set()
        row: Row | BadRow | None = None
        for row in rows:
            prompt = (
                row
                if isinstance(row, BadRow)
                else _prompt(row, prompt_field, answer_field, max_line_bytes, seen_ids)
            )
            if isinstance(prompt, Prompt):
                yield prompt
            elif on_bad is None:
                raise prompt.error()
            else:
                on_bad(prompt)
        if row is None:
            raise InputError(f"{source} has no rows.", code=E_EMPTY)

    return itertools.islice(prompts(), limit)


def _prompt(
    row: Row,
    prompt_field: str | None,
    answer_field: str | None,
    max_chars: int,
    seen_ids: set[int],
) -> Prompt | BadRow:
    try:
        columns = storable(row.columns, max_chars=max_chars)
        payload = make_payload(columns, prompt_field=prompt_field, answer_field=answer_field)
    except Unstorable as error:
        return _rejected(row, E_VALUE, str(error))
    except NoPrompt as error:
        return _rejected(row, E_PROMPT, str(error), error.remedy)
    if (given := payload.get("id")) is not None:
        # 64 bits per id, to save memory.
        key = hash((type(given).__name__, json.dumps(given)))
        if key in seen_ids:
            return _rejected(row, E_DUPLICATE, f"id {json.dumps(given)[:80]} was given before")
        seen_ids.add(key)
    return Prompt(row.row_no, payload)


def _rejected(row: Row, code: str, reason: str, remedy: str = "") -> BadRow:
    raw = preview(json.dumps(row.columns, default=str, ensure_ascii=False, skipkeys=True))
    return BadRow(row.row_no, row.location, code, reason, remedy, raw)


def _open_rows(source: str | Path, split: str, max_line_bytes: int) -> Iterator[Row | BadRow]:
    text = str(source)
    if text.startswith(PREFIX):
        return read_hub(text, split)
    path = _existing(text)
    if path.is_dir():
        return read_saved(path, split)
    if _is_parquet(path):
        return read_parquet(path)
    return read_jsonl(path, max_line_bytes=max_line_bytes)


def _existing(text: str) -> Path:
    """Return the path of a source that exists and has a reader."""
    path = Path(text).expanduser()
    if not path.exists():
        raise InputError(f"No dataset at {text}.", remedy=_did_you_mean(path), code=E_SOURCE)
    if path.is_dir() and not is_saved_dataset(path):
        raise InputError(
            f"{text} is a directory, not a dataset.", remedy=_inside(path), code=E_SOURCE
        )
    if path.is_file() and not path.name.lower().endswith(JSONL_SUFFIXES + PARQUET_SUFFIXES):
        raise InputError(
            f"{text} has no format that is known by its name.",
            remedy=f"Known: {', '.join(JSONL_SUFFIXES + PARQUET_SUFFIXES)}, {PREFIX}NAME.",
            code=E_SOURCE,
        )
    return path


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(PARQUET_SUFFIXES)


def _did_you_mean(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no directory {path.parent} either."
    names = [found.name for found in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {path.parent / near[0]}?" if near else ""


def _inside(path: Path) -> str:
    usable = sorted(
        found.name
        for found in path.iterdir()
        if found.name.lower().endswith(JSONL_SUFFIXES + PARQUET_SUFFIXES)
    )
    return f"Give one file of it: {', '.join(usable[:8])}." if usable else "It holds no dataset."
