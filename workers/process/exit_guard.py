"""The guard against exits and cancellations that foreign code raises by itself.

Used around agents and scorers, inside `boundary`. Must not: catch a cancellation that the worker
asked for, or an ordinary exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.contract.errors import RolloutError


@contextmanager
def guard_exits(error_type: type[RolloutError], source: str) -> Iterator[None]:
    """Turn an exit or a cancellation that foreign code raised by itself into a rollout error.

    An exit would end the event loop, and with it all other attempts of this worker. A cancellation
    would end the attempt without an outcome, as if the attempt were no longer wanted.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise error_type(
            f"The {source} ended by a CancelledError, but its attempt was not cancelled."
        ) from error
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        if isinstance(error, SystemExit):
            raise error_type(f"The {source} called sys.exit({error.code!r}).") from error
        raise error_type(f"The {source} raised {type(error).__name__}.") from error
