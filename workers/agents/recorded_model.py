"""`RecordedModel`: the model of a trajectory, with its calls recorded as steps.

The agents that do not write their own steps use it: a function agent gets it as `llm`, and the
endpoint of an attempt answers with it. Must not: change the messages that are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.core.base_agent import BaseAgent
from workers.core.conversation import content_chars, message_text
from workers.core.model_response import ModelResponse
from workers.core.reply_parser import read_reply, whole_reply
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep


class RecordedModel:
    """The `llm` of a function agent: calls the model and records the call.

    Args:
        agent: The agent with the sampling parameters.
        llm_generate_func: The model's client.
        trajectory: The record of the calls.
    """

    def __init__(self, agent: BaseAgent, llm_generate_func: Any, trajectory: Trajectory) -> None:
        self._agent = agent
        self._llm_generate_func = llm_generate_func
        self._trajectory = trajectory
        self.n_calls = 0

    async def __call__(self, messages: str | list[dict[str, Any]], **kwargs: Any) -> ModelResponse:
        """Send messages, or one text, and return the response; its text is `.text`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        sent = [dict(message) for message in messages]
        response = await self._agent.call_llm(
            self._llm_generate_func, messages, self._trajectory, **kwargs
        )
        self._record_sent(sent)
        self.n_calls += 1
        for step in _reply_steps(response, content_chars(sent)):
            self._trajectory.add_step(step)
        return response

    def _record_sent(self, sent: list[dict[str, Any]]) -> None:
        """Record the messages that are not in the conversation yet."""
        if self.n_calls == 0:
            self._record_prompt(sent)
            return
        known = self._trajectory.get_messages()
        is_rewritten = list(map(_meaning, sent[: len(known)])) != list(map(_meaning, known))
        for message in _after_last_reply(sent) if is_rewritten else sent[len(known) :]:
            step = _sent_step(message)
            if is_rewritten:
                step.metadata["rewritten_context"] = True
            self._trajectory.add_step(step)

    def _record_prompt(self, sent: list[dict[str, Any]]) -> None:
        """Record the messages of the first call in the prompt's step."""
        if sent and sent[0].get("role") == "system":
            self._trajectory.metadata["system_prompt"] = message_text(sent[0])
            sent = sent[1:]
        prompt_step = next(
            step for step in self._trajectory.steps if step.step_type is StepType.OBSERVATION
        )
        prompt_step.metadata["chat_messages"] = sent


def _reply_steps(response: ModelResponse, prompt_chars: int) -> list[TrajectoryStep]:
    if response.tool_calls:
        return read_reply(response, prompt_chars=prompt_chars)
    step = whole_reply(response, prompt_chars)
    step.step_type = StepType.THOUGHT
    return [step]


def _meaning(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a message that a model sees.

    SDKs write the same message in several ways: content None or empty, and fields that are None.
    """
    calls = [
        (call.get("id"), call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    content = message.get("content")
    content = content if isinstance(content, list) else message_text(message)
    return message.get("role"), content, message.get("tool_call_id"), calls


def _after_last_reply(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages after the model's last reply: the results or questions of this turn."""
    replies = [at for at, message in enumerate(sent) if message.get("role") == "assistant"]
    return sent[replies[-1] + 1 :] if replies else sent[-1:]


def _sent_step(message: dict[str, Any]) -> TrajectoryStep:
    is_assistant = message.get("role") == "assistant"
    kind = StepType.THOUGHT if is_assistant else StepType.OBSERVATION
    return TrajectoryStep(kind, message_text(message), {"chat_message": message})
