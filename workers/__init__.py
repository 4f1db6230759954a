"""Agents, tools, rewards and the worker process that runs them.

The names of the agent library can be imported from here: `from workers import AgenticRollout`. Each
is loaded when it is first used, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
    from workers.agents.coding_agent import CodingAgent
    from workers.agents.react_agent import ReActAgent
    from workers.agents.react_agent import ReActAgent as ReactAgent
    from workers.agents.tool_agent import ToolAgent
    from workers.core.base_agent import BaseAgent
    from workers.core.base_tool import BaseAgenticTool, SimpleAgenticTool
    from workers.core.base_tool import BaseAgenticTool as AgenticBaseTool
    from workers.core.registry import get_agent_class, register_agent
    from workers.core.tool_registry import (
        ToolRegistry,
        get_global_tool_registry,
        register_tool,
        tool,
    )
    from workers.core.tool_schemas import ToolResult, create_openai_tool_schema
    from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
    from workers.tools.bash_executor_tool import BashExecutorTool
    from workers.tools.calculator_tool import CalculatorTool
    from workers.tools.file_editor_tool import FileEditorTool
    from workers.tools.search_tool import SearchTool

__all__ = [
    "AgenticBaseTool",
    "AgenticRollout",
    "AgenticRolloutConfig",
    "BaseAgent",
    "BaseAgenticTool",
    "BashExecutorTool",
    "CalculatorTool",
    "CodingAgent",
    "FileEditorTool",
    "ReActAgent",
    "ReactAgent",
    "SearchTool",
    "SimpleAgenticTool",
    "StepType",
    "ToolAgent",
    "ToolRegistry",
    "ToolResult",
    "Trajectory",
    "TrajectoryStep",
    "create_agentic_rollout",
    "create_openai_tool_schema",
    "get_agent_class",
    "get_global_tool_registry",
    "register_agent",
    "register_tool",
    "tool",
]

_MODULES = {
    "AgenticRollout": "workers.agentic_rollout",
    "AgenticRolloutConfig": "workers.agentic_rollout",
    "BaseAgent": "workers.core.base_agent",
    "BaseAgenticTool": "workers.core.base_tool",
    "BashExecutorTool": "workers.tools.bash_executor_tool",
    "CalculatorTool": "workers.tools.calculator_tool",
    "CodingAgent": "workers.agents.coding_agent",
    "FileEditorTool": "workers.tools.file_editor_tool",
    "ReActAgent": "workers.agents.react_agent",
    "SearchTool": "workers.tools.search_tool",
    "SimpleAgenticTool": "workers.core.base_tool",
    "StepType": "workers.core.trajectory",
    "ToolAgent": "workers.agents.tool_agent",
    "ToolRegistry": "workers.core.tool_registry",
    "ToolResult": "workers.core.tool_schemas",
    "Trajectory": "workers.core.trajectory",
    "TrajectoryStep": "workers.core.trajectory",
    "create_agentic_rollout": "workers.agentic_rollout",
    "create_openai_tool_schema": "workers.core.tool_schemas",
    "get_agent_class": "workers.core.registry",
    "get_global_tool_registry": "workers.core.tool_registry",
    "register_agent": "workers.core.registry",
    "register_tool": "workers.core.tool_registry",
    "tool": "workers.core.tool_registry",
}
#: Names in the original library of classes that have another one here.
_OTHER_NAMES = {"AgenticBaseTool": "BaseAgenticTool", "ReactAgent": "ReActAgent"}


def __getattr__(name: str) -> Any:
    own_name = _OTHER_NAMES.get(name, name)
    if own_name not in _MODULES:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    return getattr(import_module(_MODULES[own_name]), own_name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
