"""The registered agents, tools and rewards, each described with its options.

`rollout list` prints them. Plug-ins are loaded before. Must not: print.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any

from pipeline.contract.url_secrets import hide_secret
from pipeline.settings import Settings
from workers.core.registry import get_agent_class, list_agents
from workers.core.tool_registry import get_global_tool_registry
from workers.rewards.registry import get_reward, list_rewards
from workers.tools.mcp_servers import MCP_PREFIX

KINDS = ("agents", "tools", "rewards")

Entry = dict[str, Any]


def registered(kind: str, settings: Settings) -> Iterator[Entry]:
    """Return the entries of one of `KINDS`: `name`, `summary`, `options` (None: any)."""
    match kind:
        case "agents":
            return _agents()
        case "tools":
            return _tools(settings)
        case _:
            return _rewards()


def _agents() -> Iterator[Entry]:
    for name in list_agents():
        agent = get_agent_class(name)
        function = getattr(agent, "function", None)
        callables = (
            [function] if function else [vars(base).get("__init__") for base in agent.__mro__]
        )
        yield _entry(name, agent.__doc__, agent.known_options(), callables)


def _tools(settings: Settings) -> Iterator[Entry]:
    registry = get_global_tool_registry()
    for name in registry.get_tool_names():
        tool = registry.get_tool(name)
        schema = tool.get_openai_tool_schema()
        # A tool of a class without `options` accepts any setting; a function accepts none.
        options = getattr(type(tool), "__dict__", {}).get("options", {})
        yield _entry(name, schema.function.description, options, [])
    for name, server in settings.worker.mcp.items():
        place = server.command or hide_secret(server.arguments()["url"])
        yield _entry(f"{MCP_PREFIX}{name}", f"The tools of the MCP server {place}.", {}, [])


def _rewards() -> Iterator[Entry]:
    for name in list_rewards():
        reward = get_reward(name)
        yield _entry(name, reward.function.__doc__, reward.options, [reward.function])


def _entry(
    name: str,
    text: str | None,
    options: Mapping[str, Any] | None,
    callables: list[Callable[..., Any] | None],
) -> Entry:
    """Return the entry of an agent, tool or reward; options None: any are accepted."""
    paragraph = " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())
    first, stop, _ = paragraph.partition(". ")
    summary = first + stop.strip()
    defaults = _defaults(callables)
    return {
        "name": name,
        "summary": summary or "(it has no docstring)",
        "options": None
        if options is None
        else [
            {"name": option, "type": _type_text(kind)}
            | ({"default": defaults[option]} if option in defaults else {})
            for option, kind in sorted(options.items())
        ],
    }


def _defaults(callables: list[Callable[..., Any] | None]) -> dict[str, Any]:
    """Return the default values in the signatures; the first signature takes precedence."""
    found: dict[str, Any] = {}
    for function in callables:
        if function is not None:
            for parameter in inspect.signature(function).parameters.values():
                if parameter.default is not parameter.empty:
                    found.setdefault(parameter.name, parameter.default)
    return found


def _type_text(kind: Any) -> str:
    """Return a type as in source code: `int | None`."""
    if isinstance(kind, Mapping):
        return f"{{{', '.join(kind)}}}"
    if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union:
        return " | ".join(_type_text(part) for part in typing.get_args(kind))
    if kind is NoneType:
        return "None"
    if kind is Any:
        return "any"
    plain = isinstance(kind, type) and not typing.get_args(kind)
    return (
        kind.__name__ if plain else str(kind).replace("typing.", "").replace("collections.abc.", "")
    )
