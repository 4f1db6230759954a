"""Bodies and tokens of rows, read from the row or the payload store and checked by their digest.

Used by the trainer client, the export and the command line. Must not: lease or change anything.
"""

from __future__ import annotations

from typing import Protocol

from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.queue.claim_checks import load_body, load_object, require_digest
from pipeline.queue.payloads import PayloadStore


class BodyRow(Protocol):
    """A row with the stored body of an attempt: at most one of `body` and `body_uri` is set."""

    @property
    def body(self) -> bytes | None:
        """The compressed record."""
        ...

    @property
    def body_uri(self) -> str | None:
        """Its URI in the payload store."""
        ...

    @property
    def body_digest(self) -> str | None:
        """Its digest; None in rows of earlier versions."""
        ...

    @property
    def codec(self) -> str | None:
        """Its compression; None without a body."""
        ...


class TokensRow(Protocol):
    """A row with the token body of an attempt: at most one of `tokens` and `tokens_uri` is set."""

    @property
    def tokens(self) -> bytes | None:
        """The packed tokens."""
        ...

    @property
    def tokens_uri(self) -> str | None:
        """Their URI in the payload store."""
        ...

    @property
    def tokens_digest(self) -> str | None:
        """Their digest; None without tokens."""
        ...


def read_body(row: BodyRow, payloads: PayloadStore | None) -> bytes | None:
    """Return the body of a row, None where the row has none.

    Raises:
        UnreadableBody: The body is gone or damaged, or is not the one that was accepted.
        ServiceUnavailable: The payload store does not answer.
        ConfigError: The body is in the payload store, and no payload store was given.
    """
    if row.body is not None:
        return require_digest(bytes(row.body), row.body_digest, of="in the database")
    if row.body_uri is None:
        return None
    return load_body(row.body_uri, row.body_digest, _required(payloads, row.body_uri))


def read_tokens(row: TokensRow, payloads: PayloadStore | None) -> bytes:
    """Return the token body of a row, empty where the row has none.

    Raises:
        UnreadableBody: The tokens are gone or damaged, or are not those that were accepted.
        ServiceUnavailable: The payload store does not answer.
        ConfigError: The tokens are in the payload store, and no payload store was given.
    """
    if row.tokens is not None:
        return require_digest(bytes(row.tokens), row.tokens_digest, of="in the database")
    if row.tokens_uri is None:
        return b""
    return load_object(row.tokens_uri, row.tokens_digest, _required(payloads, row.tokens_uri))


def read_record(row: BodyRow, payloads: PayloadStore) -> TrajectoryRecord | None:
    """Return the record of a row, None where the row has no body.

    Raises:
        UnreadableBody: The body is gone or damaged, or is not the one that was accepted.
        ServiceUnavailable: The payload store does not answer.
        MalformedMessage: The bytes are no record.
    """
    body = read_body(row, payloads)
    return None if body is None or row.codec is None else unpack_record(body, row.codec)


def try_read_record(
    row: BodyRow, payloads: PayloadStore
) -> tuple[TrajectoryRecord | None, PipelineError | None]:
    """Return the record, or why it cannot be read."""
    try:
        return read_record(row, payloads), None
    except PipelineError as error:
        return None, error


def _required(payloads: PayloadStore | None, uri: str) -> PayloadStore:
    if payloads is None:
        raise ConfigError(
            f"A trajectory is stored at {uri}.",
            remedy="Give the client the payload store: TrainerClient(payloads=…).",
        )
    return payloads
