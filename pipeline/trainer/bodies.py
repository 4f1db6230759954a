"""Stored trajectories as records, from the store or the payload store.

Used by the export and the command line. Must not: lease or change anything.
"""

from __future__ import annotations

from typing import Protocol

from pipeline.contract.errors import PipelineError
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.queue.payloads import PayloadStore, load_body


class BodyRow(Protocol):
    """A row with the stored body of an attempt: at most one of `body` and `body_uri` is set."""

    @property
    def body(self) -> bytes | None:
        """The compressed record."""
        ...

    @property
    def body_uri(self) -> str | None:
        """Its place in the payload store."""
        ...

    @property
    def codec(self) -> str | None:
        """How it is compressed; None without a body."""
        ...


def read_record(row: BodyRow, payloads: PayloadStore) -> TrajectoryRecord | None:
    """Return the record of a row, None where the row has no body.

    Raises:
        ServiceUnavailable: The object behind the row is gone.
        MalformedMessage: The bytes are no record.
    """
    if row.codec is None:
        return None
    if row.body is not None:
        return unpack_record(bytes(row.body), row.codec)
    if row.body_uri is not None:
        return unpack_record(load_body(row.body_uri, payloads), row.codec)
    return None


def try_read_record(
    row: BodyRow, payloads: PayloadStore
) -> tuple[TrajectoryRecord | None, PipelineError | None]:
    """Return the record, or why it cannot be read."""
    try:
        return read_record(row, payloads), None
    except PipelineError as error:
        return None, error
