"""Agents by name: the built-in ones, registered classes, and decorated async functions.

Used by `AgenticRollout` and the worker, where messages name agents. Built-in agents are imported at
their first use, so importing this module is cheap. Must not: need a running event loop.
"""

from __future__ import annotations

import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from workers.core.base_agent import BaseAgent

BUILTIN_AGENTS: Mapping[str, str] = {
    "coding": "workers.agents.coding_agent:CodingAgent",
    "command": "workers.agents.command_agent:CommandAgent",
    "react": "workers.agents.react_agent:ReActAgent",
    "single_turn": "workers.agents.single_turn_agent:SingleTurnAgent",
    "swe": "workers.agents.swe_agent:SWEAgent",
    "tool": "workers.agents.tool_agent:ToolAgent",
}

Decorated = TypeVar("Decorated", bound=Callable[..., object])

_agents: dict[str, type[BaseAgent]] = {}
# Plug-in modules may be imported from another thread than the event loop's.
_lock = threading.RLock()


def register_agent(name: str) -> Callable[[Decorated], Decorated]:
    """Register the decorated agent class or async function under a name; returns it unchanged.

    A function is `async def solve(prompt: dict, llm, ...) -> str | dict | Trajectory`;
    `workers.agents.function_agent` lists its further parameters. The options of a class are those
    of its `__init__`; one with `**kwargs` takes any, unless the class has `options`.

    Raises:
        ValueError: The name is taken.
        TypeError: The object is neither a subclass of `BaseAgent` nor such a function.
    """

    def register(decorated: Decorated) -> Decorated:
        agent_class = _agent_class_of(name, decorated)
        with _lock:
            if name in _agents or name in BUILTIN_AGENTS:
                raise ValueError(f"an agent named {name!r} is registered already; choose another")
            _agents[name] = agent_class
        return decorated

    return register


def get_agent_class(name: str) -> type[BaseAgent]:
    """Return the agent class of that name.

    Raises:
        ValueError: No agent has the name; the message lists the known names.
    """
    with _lock:
        if name in _agents:
            return _agents[name]
    if name not in BUILTIN_AGENTS:
        raise ValueError(f"Unknown agent type: {name}. Known agents: {', '.join(list_agents())}")
    return pkgutil.resolve_name(BUILTIN_AGENTS[name])


def check_agent_options(name: str, given: Mapping[str, Any]) -> None:
    """Check the given options of an agent.

    Raises:
        OptionError: An option is unknown or of a wrong type.
        ValueError: No agent has the name.
    """
    from workers.core.options import check_options

    check_options(f"Agent {name!r}", given, get_agent_class(name).known_options())


def list_agents() -> list[str]:
    """Return the names of all agents, sorted."""
    with _lock:
        return sorted({*BUILTIN_AGENTS, *_agents})


def clear_registry() -> None:
    """Remove all registered agents; the built-in ones stay."""
    with _lock:
        _agents.clear()


def _agent_class_of(name: str, decorated: Callable[..., object]) -> type[BaseAgent]:
    if not inspect.isclass(decorated):
        from workers.agents.function_agent import agent_class_of

        return agent_class_of(name, decorated)
    from workers.core.base_agent import BaseAgent

    if not issubclass(decorated, BaseAgent):
        raise TypeError(
            f"agent {name!r}: {decorated.__name__} does not derive from "
            "workers.core.base_agent.BaseAgent"
        )
    return decorated
