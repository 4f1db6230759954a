"""Reward functions that a child process can import."""

from __future__ import annotations

import os
import sys
import time


def pid_of(response: str) -> dict[str, float]:
    print("a reward may print")
    return {"reward": 1.0, "pid": os.getpid()}


async def async_one(answer: str) -> float:
    return float(answer)


def burns(response: str) -> float:
    while True:
        pass


def sleeps_then_pid(response: str) -> dict[str, float]:
    time.sleep(0.2)
    return {"reward": 1.0, "pid": os.getpid()}


def raises(response: str) -> float:
    raise ValueError(f"bad {response}")


def exits(response: str) -> float:
    sys.exit(0)


def dies(response: str) -> float:
    os._exit(7)


def unpicklable(response: str) -> object:
    return lambda: 1
