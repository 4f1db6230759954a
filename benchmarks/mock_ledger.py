"""The counts of the mock LLM: calls, calls in flight, repeated and missing rollouts.

The mock server writes them, and `/stats` returns them. The counts do not depend on the measured
system's own figures. Must not: decide any answer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class _RolloutCalls:
    """Tries and answers of each turn of one rollout."""

    __slots__ = ("answers", "tries")

    def __init__(self, turns: int) -> None:
        self.tries = [0] * turns
        self.answers = [0] * turns


class CallLedger:
    """Counts of one measurement, from one `/reset` to the next."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._rollouts: dict[str, _RolloutCalls] = {}
        self._errors: Counter[int] = Counter()
        self.calls = 0
        self.answered = 0
        self.abandoned = 0
        self.anonymous = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    def begin(self, rollout: str | None, turn: int) -> int:
        """Open a call, and return the number of earlier tries of the same call."""
        self.calls += 1
        self.in_flight += 1
        if self.in_flight > self.peak_in_flight:
            self.peak_in_flight = self.in_flight
        if rollout is None:
            self.anonymous += 1
            return self.anonymous
        calls = self._rollouts.get(rollout)
        if calls is None:
            calls = self._rollouts[rollout] = _RolloutCalls(self._turns)
        index = min(turn, self._turns - 1)
        calls.tries[index] += 1
        return calls.tries[index] - 1

    def end(self, rollout: str | None, turn: int, status: int) -> None:
        """Close a call whose response was written."""
        self.in_flight -= 1
        if status != 200:
            self._errors[status] += 1
            return
        self.answered += 1
        if rollout is not None:
            self._rollouts[rollout].answers[min(turn, self._turns - 1)] += 1

    def abandon(self) -> None:
        """Close a call whose client went away before its response was due."""
        self.in_flight -= 1
        self.abandoned += 1

    def summary(self, expected: int | None = None) -> dict[str, Any]:
        """Return all counts as JSON values; with `expected` rollouts also the missing ones."""
        rollouts = self._rollouts.values()
        finished = sum(calls.answers[-1] > 0 for calls in rollouts)
        return {
            "calls": self.calls,
            "answered": self.answered,
            "errors": {str(status): count for status, count in sorted(self._errors.items())},
            "abandoned": self.abandoned,
            "anonymous": self.anonymous,
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "rollouts_seen": len(rollouts),
            "rollouts_finished": finished,
            "rollouts_unfinished": len(rollouts) - finished,
            "rollouts_missing": None if expected is None else max(0, expected - finished),
            "rollouts_repeated": sum(max(calls.answers) > 1 for calls in rollouts),
            "calls_repeated": sum(max(0, n - 1) for calls in rollouts for n in calls.answers),
        }
