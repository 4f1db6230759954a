"""Stored trajectories as records, wherever their bodies lie.

Used by the export and the command line. Must not: lease or change anything.
"""

from __future__ import annotations

from typing import Any

from pipeline.contract.errors import PipelineError
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.queue.payloads import PayloadStore, load_body


def read_record(row: Any, payloads: PayloadStore) -> TrajectoryRecord | None:
    """Return the record of a row with `body`, `body_uri`, `codec`; None where it has none.

    Raises:
        ServiceUnavailable: The object behind the row is gone.
        MalformedMessage: The bytes are no record.
    """
    if row.body is not None:
        return unpack_record(bytes(row.body), row.codec)
    if row.body_uri is not None:
        return unpack_record(load_body(row.body_uri, payloads), row.codec)
    return None


def try_read_record(
    row: Any, payloads: PayloadStore
) -> tuple[TrajectoryRecord | None, PipelineError | None]:
    """Return the record, or why it cannot be read."""
    try:
        return read_record(row, payloads), None
    except PipelineError as error:
        return None, error
