"""Conversion between the library's trajectories and stored records.

Used by an attempt when it ends or fails, and for the scoring of a stored trajectory. Must not: know
the broker or the payload store.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.contract.rollout import StopReason
from pipeline.contract.trajectory import TrajectoryRecord
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.process.model_calls import ModelCalls

#: Metadata that the record holds in its fields `tools` and `messages`.
_OWN_FIELDS = frozenset({"tools", "system_prompt"})
#: Metadata of a reply's first step that the recorded call holds.
_IDS = "completion_token_ids"
_ID_FIELDS = frozenset({"prompt_token_ids", _IDS})


def record_of(trajectory: Trajectory, calls: ModelCalls | None) -> TrajectoryRecord:
    """Return the record of an attempt, also where the agent kept no trajectory."""
    messages = trajectory.get_messages() if trajectory.steps else []
    if not messages and calls is not None:
        messages = calls.last_messages
    data = _without_ids(trajectory).to_dict()
    metadata: dict[str, Any] = {
        key: value for key, value in data["metadata"].items() if key not in _OWN_FIELDS
    }
    return TrajectoryRecord(
        messages=messages,
        steps=data["steps"],
        calls=calls.calls if calls is not None else [],
        tools=data["metadata"].get("tools", {}),
        metadata=metadata,
    )


def trajectory_of(record: TrajectoryRecord, request_id: str) -> Trajectory:
    """Return the trajectory that a record was made from, for a scorer."""
    metadata = dict(record.metadata)
    if record.tools:
        metadata["tools"] = record.tools
    messages = record.messages
    if messages and messages[0].get("role") == "system":
        metadata["system_prompt"] = messages[0].get("content")
        messages = messages[1:]
    steps = [TrajectoryStep.from_dict(step) for step in record.steps]
    if not steps:
        # The agent kept no trajectory: the conversation is the only source.
        steps = [_step_of(message) for message in messages]
    return Trajectory(
        request_id,
        steps,
        metadata,
        is_completed=True,
        total_tokens=sum(
            (call.prompt_tokens or 0) + (call.completion_tokens or 0) for call in record.calls
        ),
    )


def stop_reason_of(trajectory: Trajectory) -> StopReason:
    """Return the stop reason of a trajectory; an unknown one of the agent counts as `answered`."""
    try:
        return StopReason(trajectory.metadata.get("stop_reason", StopReason.ANSWERED))
    except ValueError:
        return StopReason.ANSWERED


def _without_ids(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without the ids and logprobs of its replies: the calls hold them."""
    if not any(_IDS in step.metadata or step.log_probs for step in trajectory.steps):
        return trajectory
    steps = [
        replace(
            step,
            metadata={key: value for key, value in step.metadata.items() if key not in _ID_FIELDS},
            log_probs=None,
        )
        for step in trajectory.steps
    ]
    return replace(trajectory, steps=steps)


def _step_of(message: dict[str, Any]) -> TrajectoryStep:
    is_by_model = message.get("role") == "assistant"
    kind = StepType.THOUGHT if is_by_model else StepType.OBSERVATION
    return TrajectoryStep(kind, str(message.get("content") or ""), {"chat_message": message})
