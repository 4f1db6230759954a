"""The base class of an app's reward functions.

Authors of apps derive from it and call it in their entrypoints. Must not: validate values, because
the app does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class RewardFunction(ABC):
    """A function from the facts about a rollout to its reward."""

    @abstractmethod
    def __call__(self, **kwargs: Any) -> float | list[float]:
        """Return the reward: one finite number, or a list of one number or of one per turn.

        Args:
            **kwargs: The app's arguments, such as `response_text`, `ground_truth`, `user_input`.
        """
