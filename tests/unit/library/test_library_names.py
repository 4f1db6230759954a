"""The names of the agent library that scripts import from `workers`."""

import subprocess
import sys

import pytest

import workers
from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
from workers.agents.coding_agent import CodingAgent
from workers.agents.react_agent import ReActAgent
from workers.agents.tool_agent import ToolAgent
from workers.core.base_agent import BaseAgent
from workers.core.base_tool import BaseAgenticTool, SimpleAgenticTool
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

NAMES = {
    "AgenticBaseTool": BaseAgenticTool,
    "AgenticRollout": AgenticRollout,
    "AgenticRolloutConfig": AgenticRolloutConfig,
    "BaseAgent": BaseAgent,
    "BaseAgenticTool": BaseAgenticTool,
    "BashExecutorTool": BashExecutorTool,
    "CalculatorTool": CalculatorTool,
    "CodingAgent": CodingAgent,
    "FileEditorTool": FileEditorTool,
    "ReActAgent": ReActAgent,
    "ReactAgent": ReActAgent,
    "SearchTool": SearchTool,
    "SimpleAgenticTool": SimpleAgenticTool,
    "StepType": StepType,
    "ToolAgent": ToolAgent,
    "ToolRegistry": ToolRegistry,
    "ToolResult": ToolResult,
    "Trajectory": Trajectory,
    "TrajectoryStep": TrajectoryStep,
    "create_agentic_rollout": create_agentic_rollout,
    "create_openai_tool_schema": create_openai_tool_schema,
    "get_agent_class": get_agent_class,
    "get_global_tool_registry": get_global_tool_registry,
    "register_agent": register_agent,
    "register_tool": register_tool,
    "tool": tool,
}


def test_the_package_gives_these_names_and_no_others():
    assert set(workers.__all__) == set(NAMES)
    assert {name: getattr(workers, name) for name in NAMES} == NAMES
    assert set(NAMES) <= set(dir(workers))


def test_a_name_that_it_does_not_have_is_told():
    with pytest.raises(AttributeError, match="no attribute 'Agent'"):
        _ = workers.Agent


def test_importing_the_package_loads_nothing_else():
    code = "import workers, sys; print(*(n for n in sys.modules if n.startswith('workers.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_the_core_of_the_library_loads_no_client_and_no_broker():
    code = (
        "import importlib, pkgutil, sys, workers.core\n"
        "for module in pkgutil.iter_modules(workers.core.__path__, 'workers.core.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*({'openai', 'celery', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
