"""`DataProto`, the batch type of trainers of the verl family.

Ours only holds columns in numpy; if verl is installed, its own class is used. Used by
`AgenticRollout.generate_sequences`. Must not: import verl or torch before a batch is made.
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
            tensors: Numeric columns, as arrays or lists.
            non_tensors: Columns of any objects.
            meta_info: Values of the whole batch.
        """
        return cls(
            {name: np.asarray(column) for name, column in (tensors or {}).items()},
            {name: object_column(column) for name, column in (non_tensors or {}).items()},
            dict(meta_info or {}),
        )

    def __len__(self) -> int:
        return next((len(column) for _, column in self._columns()), 0)

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
