"""The turns of one request, each with all messages up to the assistant's, in the OpenAI format.

The collectors of all frameworks use it. Messages are kept once for all turns; a new list begins
where the agent's context management rewrote the conversation. Must not: know a framework.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Turn:
    conversation: int  #: index of its message list
    n_messages: int  #: its messages are the first ones of that list
    request: dict[str, Any]


class Turns:
    """The turns so far."""

    def __init__(self) -> None:
        self._conversations: list[list[dict[str, Any]]] = []
        self._turns: list[_Turn] = []

    def add(self, messages: list[dict[str, Any]], **request: Any) -> None:
        """Add a turn.

        Args:
            messages: The conversation, up to and including the assistant's message.
            **request: Other fields of the request, such as `model` and `tools`.
        """
        messages = copy.deepcopy(messages)
        known = self._conversations[-1] if self._conversations else None
        if known is None or messages[: len(known)] != known:
            self._conversations.append(messages)
        else:
            known.extend(messages[len(known) :])
        self._turns.append(_Turn(len(self._conversations) - 1, len(messages), request))

    def rollout_data(self) -> list[dict[str, Any]]:
        """Return one item per turn: `turn_id`, and `formatted_request`."""
        return [
            {
                "turn_id": number,
                "formatted_request": {
                    "messages": self._conversations[turn.conversation][: turn.n_messages],
                    **turn.request,
                },
            }
            for number, turn in enumerate(self._turns)
        ]
