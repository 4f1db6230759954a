"""`DataProto`, the batch that trainers of the verl family hand in and take back.

Ours is a light one on numpy, with the part of verl's interface that rollouts need; where verl is
installed its own class is used. Used by `AgenticRollout.generate_sequences`. Must not: import verl
or torch before a batch is made.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class DataProtoItem:
    """One row of a batch."""

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Rows as columns: `batch` numeric arrays, `non_tensor_batch` object arrays, equal lengths.

    `meta_info` belongs to the whole batch.
    """

    batch: dict[str, Array] = field(default_factory=dict)
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse columns of unequal length."""
        lengths = {name: len(column) for name, column in self._columns()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a DataProto must be equally long, not {lengths}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build a batch from columns.

        Args:
            tensors: Numeric columns; anything numpy takes.
            non_tensors: Columns of any objects.
            meta_info: What belongs to the whole batch.
        """
        return cls(
            {name: np.asarray(column) for name, column in (tensors or {}).items()},
            {name: object_column(column) for name, column in (non_tensors or {}).items()},
            dict(meta_info or {}),
        )

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """Build a batch from one dict: object arrays and lists are non-tensors."""
        tensors, non_tensors = {}, {}
        for name, column in data.items():
            is_tensor = hasattr(column, "dtype") and column.dtype != object
            (tensors if is_tensor else non_tensors)[name] = column
        return cls.from_dict(tensors, non_tensors, meta_info)

    @staticmethod
    def concat(batches: Sequence[DataProto]) -> DataProto:
        """Join batches of equal columns, row after row; `meta_info` is the first one's."""
        first = batches[0]
        return DataProto(
            {name: np.concatenate([b.batch[name] for b in batches]) for name in first.batch},
            {
                name: np.concatenate([b.non_tensor_batch[name] for b in batches])
                for name in first.non_tensor_batch
            },
            dict(first.meta_info),
        )

    def __len__(self) -> int:
        return next((len(column) for _, column in self._columns()), 0)

    def __getitem__(self, index: Any) -> DataProto | DataProtoItem:
        """Return one row for a number, a batch for a slice or a list of numbers."""
        tensors = {name: column[index] for name, column in self.batch.items()}
        others = {name: column[index] for name, column in self.non_tensor_batch.items()}
        is_row = isinstance(index, int | np.integer)
        return (DataProtoItem if is_row else DataProto)(tensors, others, self.meta_info)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Return a batch of some columns; None keeps all of its kind."""
        return DataProto(
            {k: v for k, v in self.batch.items() if batch_keys is None or k in batch_keys},
            {
                k: v
                for k, v in self.non_tensor_batch.items()
                if non_tensor_batch_keys is None or k in non_tensor_batch_keys
            },
            dict(self.meta_info),
        )

    def union(self, other: DataProto) -> DataProto:
        """Return a batch with the columns of both.

        Raises:
            ValueError: A column is in both and differs.
        """
        mine, theirs = dict(self._columns()), dict(other._columns())
        for name in mine.keys() & theirs.keys():
            if not np.array_equal(mine[name], theirs[name]):
                raise ValueError(f"column {name!r} is in both batches and differs")
        return DataProto(
            {**self.batch, **other.batch},
            {**self.non_tensor_batch, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
        )

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return the batch n times: each row n times in turn, or the whole n times."""
        order = np.arange(len(self))
        order = np.repeat(order, repeat_times) if interleave else np.tile(order, repeat_times)
        repeated = self[order]
        assert isinstance(repeated, DataProto)
        return repeated

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into equal parts.

        Raises:
            ValueError: The rows do not divide.
        """
        if len(self) % chunks:
            raise ValueError(f"{len(self)} rows do not divide into {chunks} equal parts")
        size = len(self) // chunks
        parts = [self[start : start + size] for start in range(0, len(self), size)]
        return [part for part in parts if isinstance(part, DataProto)]

    def _columns(self) -> Iterator[tuple[str, Array]]:
        yield from self.batch.items()
        yield from self.non_tensor_batch.items()


def has_verl() -> bool:
    """Say whether verl is installed, without importing it."""
    return "verl" in sys.modules or importlib.util.find_spec("verl") is not None


def make_data_proto(
    tensors: Mapping[str, Array],
    non_tensors: Mapping[str, Sequence[Any]],
    meta_info: Mapping[str, Any],
) -> Any:
    """Return a batch: verl's `DataProto` on torch tensors where verl is installed, else ours."""
    if not has_verl():
        return DataProto.from_dict(tensors, non_tensors, meta_info)
    # Importing verl costs seconds, so it waits until a batch is really made.
    import torch  # type: ignore[import-not-found]
    from verl.protocol import DataProto as VerlDataProto  # type: ignore[import-not-found]

    return VerlDataProto.from_dict(
        tensors={name: torch.from_numpy(column) for name, column in tensors.items()},
        non_tensors={name: object_column(column) for name, column in non_tensors.items()},
        meta_info=dict(meta_info),
    )


def object_column(values: Any) -> Array:
    """Return values as a one-dimensional column of objects, never as a matrix."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    column = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        column[number] = value
    return column
