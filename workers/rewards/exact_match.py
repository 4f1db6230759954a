"""The reward `exact_match`: the answer's text is the gold text.

Imported by the registry on first use. Must not: understand the text.
"""

from __future__ import annotations

from typing import Any

from workers.rewards.gold_answer import gold_text
from workers.rewards.registry import register_reward


@register_reward("exact_match", inline=True)
def exact_match(response: str, answer: Any, *, ignore_case: bool = False) -> float:
    """Return 1.0 when both texts are the same but for white space at their ends."""
    given, gold = response.strip(), gold_text(answer).strip()
    if ignore_case:
        given, gold = given.casefold(), gold.casefold()
    return float(given == gold)
