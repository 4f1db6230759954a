"""The table of the errors of Postgres: whether the data, the store, or a statement is at fault.

Used by `engine.py` for every transaction and by the collector. Keys are SQLSTATEs, or their first
two characters, which name a class (PostgreSQL manual, appendix A). Must not: retry, or know tables.
"""

from __future__ import annotations

from enum import Enum, auto

import psycopg
from sqlalchemy.exc import DBAPIError


class Fault(Enum):
    """The cause of an error of Postgres."""

    DATA = auto()  #: the same data would be refused again
    AWAY = auto()  #: Postgres is away, full or read-only, or rejects the connection
    CONFLICT = auto()  #: another transaction was in the way; the same one may succeed now
    RESOURCES = auto()  #: the statement took too much memory or time
    SCHEMA = auto()  #: a table, a column or a privilege is missing
    OTHER = auto()  #: a bug, in our statements or in Postgres


_FAULTS = {
    "08": Fault.AWAY,  # connection exception
    "21": Fault.DATA,  # cardinality violation: a key occurs twice in one statement
    "22": Fault.DATA,  # data exception
    "23": Fault.DATA,  # integrity constraint violation
    "25": Fault.AWAY,  # read-only after a failover (25006), timeouts of idle transactions
    "28": Fault.AWAY,  # invalid authorization
    "3D": Fault.AWAY,  # the database does not exist
    "40": Fault.CONFLICT,  # deadlock, serialization failure
    "42": Fault.SCHEMA,  # statements are constant, so no data causes an error of this class
    "53": Fault.AWAY,  # the disk is full, too many connections
    "53200": Fault.RESOURCES,  # out of memory
    "54": Fault.DATA,  # program limit exceeded, such as the size of an index entry
    "55": Fault.CONFLICT,  # lock not available
    "57": Fault.AWAY,  # shutdown, crash, start under way
    "57014": Fault.RESOURCES,  # statement timeout
    "58": Fault.AWAY,  # system error
}


def fault_of(error: BaseException) -> Fault | None:
    """Return the cause of an error, None if it does not come from Postgres."""
    found = _of_postgres(error)
    state = getattr(found, "sqlstate", None)
    if state is not None:
        return _FAULTS.get(state) or _FAULTS.get(state[:2], Fault.OTHER)
    match found:  # errors of the client itself have no SQLSTATE
        case None:
            return None
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return Fault.AWAY
        case psycopg.DataError():
            return Fault.DATA
        case _:
            return Fault.OTHER


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, also of one of the pipeline's that has it as its cause."""
    return getattr(_of_postgres(error), "sqlstate", None)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's text, without the statement and its parameters."""
    lines = str(_of_postgres(error) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _of_postgres(error: BaseException) -> BaseException | None:
    """Return the driver's error within SQLAlchemy's or the pipeline's."""
    if isinstance(error, DBAPIError):
        return error.orig or error
    if isinstance(error, psycopg.Error) or error.__cause__ is None:
        return error if isinstance(error, psycopg.Error) else None
    return _of_postgres(error.__cause__)
