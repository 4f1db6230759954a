"""The far side of `reward_processes`: reads calls from stdin, writes values to stdout.

Started by `reward_processes` alone. What a reward function prints goes to stderr, so it cannot
disturb the answers. Must not: outlive its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Answer calls until stdin ends."""
    _die_with_parent()
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    while request := _read(calls):
        answer = _answer(request)
        answers.write(len(answer).to_bytes(_LENGTH_BYTES, "big") + answer)
        answers.flush()


def _answer(request: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(request)
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return _packed(value)
    # Broad on purpose: whatever the function raises, sys.exit included, is told to the parent.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps((True, value))
    # Broad on purpose: what pickle raises differs between types and Python versions.
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the reward returned a {kind} that cannot be pickled: {error}") from error


async def _awaited(value: Any) -> Any:
    return await value


def _read(calls: BinaryIO) -> bytes:
    head = calls.read(_LENGTH_BYTES)
    return calls.read(int.from_bytes(head, "big")) if len(head) == _LENGTH_BYTES else b""


def _die_with_parent() -> None:
    # A function that never returns never sees stdin end.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
