"""The record of one attempt: its steps, and the conversation and figures computed from them.

Made by agents; read by rewards, exporters and the pipeline. Must not: import anything but the
standard library, so that the import stays cheap; call a model, run a tool or parse a reply.

The conversation: the metadata "chat_message" of a step is its message; None means that the message
of an earlier step contains the step. "chat_messages" are several messages. A step without either
becomes a message by its kind and content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from workers.core.json_safe import json_safe

#: Key of the metadata of a trajectory: replies that looked like a call and could not be read.
LOST_CALLS = "lost_calls"


class StepType(Enum):
    """The kind of a step."""

    OBSERVATION = "observation"
    THOUGHT = "thought"
    ACTION = "action"
    ACTION_RESULT = "action_result"
    FINAL_ANSWER = "final_answer"


_MODEL_INPUT = (StepType.OBSERVATION, StepType.ACTION_RESULT)


@dataclass
class TrajectoryStep:
    """One element of a trajectory.

    `reward_score` None is "not scored", which is not 0. `log_probs` are of the sampled tokens.
    """

    step_type: StepType
    content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    tool_name: str | None = None
    tool_args: dict[str, Any] | None = None
    tool_result: Any = None
    reward_score: float | None = None
    is_correct: bool | None = None
    log_probs: list[float] | None = None
    attention_mask: list[int] | None = None

    def to_message(self) -> dict[str, str]:
        """Return the step as a message: input of the model is of role user, output of assistant."""
        role = "user" if self.step_type in _MODEL_INPUT else "assistant"
        return {"role": role, "content": self.content}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe data; `from_dict` takes it back."""
        return {
            "step_type": self.step_type.value,
            "content": self.content,
            "metadata": json_safe(self.metadata),
            "tool_name": self.tool_name,
            "tool_args": json_safe(self.tool_args),
            "tool_result": json_safe(self.tool_result),
            "reward_score": json_safe(self.reward_score),
            "is_correct": self.is_correct,
            "log_probs": json_safe(self.log_probs),
            "attention_mask": json_safe(self.attention_mask),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrajectoryStep:
        """Rebuild a step from `to_dict`'s data; keys that are absent take their defaults."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**known, "step_type": StepType(data["step_type"])})


@dataclass
class Trajectory:
    """The steps of one attempt and its result.

    `metadata["stop_reason"]` is the reason why a good trajectory ended. `total_tokens` counts the
    prompt and sampled tokens of all model calls; `metadata["tokens_estimated"]` is True if the
    server gave no usage. `final_reward` None is "not scored".
    """

    request_id: str
    steps: list[TrajectoryStep] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    is_completed: bool = False
    final_reward: float | None = None
    total_tokens: int = 0

    def add_step(self, step: TrajectoryStep) -> None:
        """Append a step and count the tokens of its model call, if it has any."""
        self.steps.append(step)
        usage = step.metadata.get("usage")
        if usage:
            self._count(usage)

    def get_messages(self) -> list[dict[str, Any]]:
        """Return the whole conversation in the OpenAI format, the system prompt first."""
        messages: list[dict[str, Any]] = []
        if system_prompt := self.metadata.get("system_prompt"):
            messages.append({"role": "system", "content": system_prompt})
        for step in self.steps:
            if "chat_message" in step.metadata:
                if step.metadata["chat_message"] is not None:
                    messages.append(dict(step.metadata["chat_message"]))
            elif "chat_messages" in step.metadata:
                messages += map(dict, step.metadata["chat_messages"])
            else:
                messages.append(step.to_message())
        return messages

    def get_final_response(self) -> str:
        """Return the last answer, also one that an interaction replied to; empty without any.

        A thought or the arguments of a call are no answer, so that no reward is given for them.
        """
        for step in reversed(self.steps):
            if step.step_type is StepType.FINAL_ANSWER or "answered_by" in step.metadata:
                return step.content
        return ""

    def get_tool_calls(self) -> list[TrajectoryStep]:
        """Return the action steps."""
        return [step for step in self.steps if step.step_type is StepType.ACTION]

    def get_total_reward(self) -> float:
        """Return the sum of the steps' rewards; steps that were not scored do not count."""
        return float(sum(step.reward_score for step in self.steps if step.reward_score is not None))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe data; `from_dict` takes it back without loss."""
        return {
            "request_id": self.request_id,
            "steps": [step.to_dict() for step in self.steps],
            "metadata": json_safe(self.metadata),
            "is_completed": self.is_completed,
            "final_reward": json_safe(self.final_reward),
            "total_tokens": self.total_tokens,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """Rebuild a trajectory from `to_dict`'s data."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        steps = [TrajectoryStep.from_dict(step) for step in data.get("steps", ())]
        return cls(**{**known, "steps": steps})

    def _count(self, usage: dict[str, Any]) -> None:
        totals = self.metadata.setdefault(
            "usage", {"model_calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
        )
        prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        totals["model_calls"] += 1
        totals["prompt_tokens"] += prompt
        totals["completion_tokens"] += completion
        self.total_tokens += prompt + completion
        if usage.get("estimated"):
            self.metadata["tokens_estimated"] = True
