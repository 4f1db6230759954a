"""Ends that foreign code may not bring about: of the event loop, or of a task by nobody's wish.

Around agents and scorers, inside `boundary`. Must not: catch a cancellation that somebody asked
for, nor what is an ordinary exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.contract.errors import RolloutError


@contextmanager
def guard_exits(error_type: type[RolloutError], who: str) -> Iterator[None]:
    """Make an error of this rollout of an exit or a cancellation that its code raised by itself.

    An exit would end the event loop, and with it all other attempts of this worker. A cancellation
    would end the attempt without an outcome, as if it were no longer wanted.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise error_type(
            f"The {who} ended by a CancelledError, and nobody had cancelled it."
        ) from error
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        if isinstance(error, SystemExit):
            raise error_type(f"The {who} called sys.exit({error.code!r}).") from error
        raise error_type(f"The {who} raised {type(error).__name__}.") from error
