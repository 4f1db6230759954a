"""`AgenticRolloutConfig`: the configuration of `AgenticRollout`, and its forms as a dict.

Read by `AgenticRollout` when an object is made, and with it the variable
`AGENTIC_SAVE_TRAJECTORIES`. Must not: know an agent or a tool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def _saves_by_default() -> bool:
    value = os.environ.get("AGENTIC_SAVE_TRAJECTORIES", "").strip().lower()
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise ValueError(f"AGENTIC_SAVE_TRAJECTORIES is {value!r}; set it to true or false")


@dataclass
class AgenticRolloutConfig:
    """The configuration of a rollout.

    Attributes:
        agent_type: Name of a registered agent.
        max_steps: Most steps of a trajectory.
        max_tokens_per_step: Most tokens sampled by one model call.
        temperature: Sampling temperature.
        tools_config: Tool name to its settings, such as `{"calculator": {"precision": 10}}`.
        interactions_config: Interaction name to object or class, see `workers.core.interaction`.
        agent_config: Further options of the agent, such as `{"native_tools": True}`.
        batch_size: Number of finished trajectories that are written to disk together.
        concurrent_requests: Most concurrent trajectories, and most concurrent model calls.
        include_trajectory_in_output: Whether `generate_sequences` returns whole trajectories, too.
        save_trajectories: Whether trajectories are written as JSON files; the default is the value
            of `AGENTIC_SAVE_TRAJECTORIES`.
        trajectory_save_path: Directory for them; `./trajectories` when None.
    """

    agent_type: str = "react"
    max_steps: int = 10
    max_tokens_per_step: int = 512
    temperature: float = 0.7
    tools_config: Mapping[str, Any] | Sequence[str] | None = None
    interactions_config: Mapping[str, Any] | None = None
    agent_config: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    concurrent_requests: int = 4
    include_trajectory_in_output: bool = True
    save_trajectories: bool = field(default_factory=_saves_by_default)
    trajectory_save_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Reject numbers with which no trajectory could run."""
        for name in ("max_steps", "max_tokens_per_step", "batch_size", "concurrent_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def read_rollout_config(
    config: AgenticRolloutConfig | Mapping[str, Any] | None, changes: Mapping[str, Any]
) -> AgenticRolloutConfig:
    """Return a configuration from another one, or from a dict of its fields, with changes.

    A dict may have verl's form: the fields under "agent_config" beside a "rollout_type".

    Raises:
        ValueError: A field is unknown or has an invalid value.
    """
    known = [item.name for item in fields(AgenticRolloutConfig)]
    if isinstance(config, AgenticRolloutConfig):
        values = {name: getattr(config, name) for name in known}
    else:
        values = dict(config or {})
        if values.pop("rollout_type", "agentic") != "agentic":
            raise ValueError("rollout_type must be 'agentic'")
        nested = values.get("agent_config") or {}
        values["agent_config"] = {k: v for k, v in nested.items() if k not in known}
        values |= {k: v for k, v in nested.items() if k in known}
    values |= changes
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"unknown rollout settings: {', '.join(unknown)}; known: {', '.join(known)}"
        )
    return AgenticRolloutConfig(**values)
