"""Rows of Hugging Face datasets: `hf:NAME[:CONFIG]` by streaming, or a directory saved to disk.

`datasets.py` calls it. The extra `datasets` is required, and imported on first use. Must not: run
a dataset's own code (`trust_remote_code` stays off).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.contract.errors import InputError
from producers.rows import E_EXTRA, E_SOURCE, Row

PREFIX = "hf:"
#: Files that `save_to_disk` writes for one split, or for several.
SAVED_MARKS = ("state.json", "dataset_dict.json")


def is_saved_dataset(path: Path) -> bool:
    """Say whether a directory was written by `save_to_disk`."""
    return any((path / mark).is_file() for mark in SAVED_MARKS)


def read_hub(source: str, split: str, *, library: Any = None) -> Iterator[Row]:
    """Yield the rows of `hf:NAME[:CONFIG]`.

    Args:
        source: The name with its prefix.
        split: Name of the split.
        library: Substitute for the package `datasets` in tests.
    """
    name, _, config = source.removeprefix(PREFIX).partition(":")
    library = library or _library(source)
    with _errors_of(source):
        loaded = library.load_dataset(name, config or None, split=split, streaming=True)
    yield from _rows(source, loaded)


def read_saved(path: Path, split: str) -> Iterator[Row]:
    """Yield the rows of one split of a directory that `save_to_disk` wrote."""
    yield from _rows(str(path), _load_saved(path, split))


def _load_saved(path: Path, split: str) -> Any:
    library = _library(str(path))
    with _errors_of(str(path)):
        loaded = library.load_from_disk(str(path))
    if not isinstance(loaded, Mapping):
        return loaded
    if split in loaded:
        return loaded[split]
    raise InputError(
        f"{path} has no split `{split}`.",
        remedy=f"It has: {', '.join(sorted(map(str, loaded)))}. Choose with --split.",
        code=E_SOURCE,
    )


def _rows(source: str, loaded: Any) -> Iterator[Row]:
    rows = iter(loaded)
    row_no = 0
    while True:
        with _errors_of(source):
            columns = next(rows, None)
        if columns is None:
            return
        yield Row(row_no, f"{source} row {row_no + 1}", dict(columns))
        row_no += 1


def _library(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{source} is a Hugging Face dataset, and their library is not installed.",
            remedy='pip install "rollout-pipeline[datasets]"',
            code=E_EXTRA,
        ) from error
    return datasets


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """Turn the library's errors into ours; all its error types derive from these three."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"The dataset {source} cannot be loaded.",
            why=f"{type(error).__name__}: {error}",
            remedy="Check name, configuration, split and network access.",
            code=E_SOURCE,
        ) from error
