"""The reward of GSM8K: 1.0 if the last number after `####` is the gold answer, else 0.0."""

from __future__ import annotations

import re
from typing import Any

from workers.agentcore import RewardFunction

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


class GSM8KReward(RewardFunction):
    """Compares final numbers; thousands separators and currency signs do not count."""

    def __call__(self, response_text: str = "", ground_truth: str = "", **_: Any) -> float:
        """Return 1.0 for the right number, 0.0 for another or none."""
        given, gold = _last_number(response_text), _last_number(ground_truth)
        return float(given is not None and given == gold)


def _last_number(text: str) -> float | None:
    marked = text.rpartition("####")[2] if "####" in text else text
    numbers = _NUMBER.findall(marked)
    return float(re.sub(r"[$,]", "", numbers[-1])) if numbers else None
