"""Agents, tools, rewards and the worker process that runs them.

The names of the agent library can be imported from here: `from workers import AgenticRollout`. Each
is loaded when it is first used, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
    from workers.core.base_agent import BaseAgent
    from workers.core.base_tool import BaseAgenticTool, SimpleAgenticTool
    from workers.core.registry import get_agent_class, register_agent
    from workers.core.tool_registry import ToolRegistry, get_global_tool_registry, tool
    from workers.core.tool_schemas import ToolResult, create_openai_tool_schema
    from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

__all__ = [
    "AgenticRollout",
    "AgenticRolloutConfig",
    "BaseAgent",
    "BaseAgenticTool",
    "SimpleAgenticTool",
    "StepType",
    "ToolRegistry",
    "ToolResult",
    "Trajectory",
    "TrajectoryStep",
    "create_agentic_rollout",
    "create_openai_tool_schema",
    "get_agent_class",
    "get_global_tool_registry",
    "register_agent",
    "tool",
]

_MODULES = {
    "AgenticRollout": "workers.agentic_rollout",
    "AgenticRolloutConfig": "workers.agentic_rollout",
    "BaseAgent": "workers.core.base_agent",
    "BaseAgenticTool": "workers.core.base_tool",
    "SimpleAgenticTool": "workers.core.base_tool",
    "StepType": "workers.core.trajectory",
    "ToolRegistry": "workers.core.tool_registry",
    "ToolResult": "workers.core.tool_schemas",
    "Trajectory": "workers.core.trajectory",
    "TrajectoryStep": "workers.core.trajectory",
    "create_agentic_rollout": "workers.agentic_rollout",
    "create_openai_tool_schema": "workers.core.tool_schemas",
    "get_agent_class": "workers.core.registry",
    "get_global_tool_registry": "workers.core.tool_registry",
    "register_agent": "workers.core.registry",
    "tool": "workers.core.tool_registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
