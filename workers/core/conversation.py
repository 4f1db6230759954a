"""The first step of a trajectory, made of a prompt, and the text of messages.

Called by agents. Must not: add instructions of an agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

PROMPT_FIELDS = ("content", "prompt", "question")


def begin_trajectory(
    prompt: Mapping[str, Any] | str, request_id: str, trajectory: Trajectory | None = None
) -> Trajectory:
    """Record the prompt as the first step of a trajectory, of a new one when None.

    A system message at the beginning of "messages" goes to `metadata["prompt_system"]`.

    Raises:
        ValueError: The prompt has no content and no messages.
    """
    messages = _messages_of(prompt)
    trajectory = trajectory if trajectory is not None else Trajectory(request_id)
    if messages[0].get("role") == "system":
        trajectory.metadata["prompt_system"] = message_text(messages[0])
        messages = messages[1:]
    if not messages:
        raise ValueError("the prompt has a system message and nothing else; add a user message")
    step = TrajectoryStep(StepType.OBSERVATION, message_text(messages[-1]))
    if messages != [step.to_message()]:
        step.metadata["chat_messages"] = messages
    trajectory.add_step(step)
    return trajectory


def message_text(message: Mapping[str, Any]) -> str:
    """Return a message's text; of content in parts, the text parts."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return "" if content is None else str(content)


def content_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of characters of the messages' texts."""
    return sum(len(message_text(message)) for message in messages)


def _messages_of(prompt: Mapping[str, Any] | str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    given = prompt.get("messages")
    for field in PROMPT_FIELDS:
        given = given or prompt.get(field)
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given and isinstance(given, Sequence) and all(isinstance(item, Mapping) for item in given):
        return [dict(message) for message in given]
    raise ValueError(
        f"the prompt has neither text in one of {', '.join(PROMPT_FIELDS)} nor a list of "
        f"messages; its fields are: {', '.join(map(str, prompt)) or 'none'}"
    )
