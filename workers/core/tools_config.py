"""The tools that a `tools_config` names: made with their settings, and placed on the same files.

Used by the agents and by the worker. Must not: register a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.core.tool_call import checked_tool
from workers.core.tool_registry import get_global_tool_registry

#: Tools that use files, and their settings that say which.
_WITH_FILES = ("bash_executor", "file_editor")
_PLACE = ("sandbox", "root", "limits", "options")


def create_tools(
    tools_config: Mapping[str, Any] | Sequence[str] | None, *, in_sandbox: bool = False
) -> dict[str, Any]:
    """Return tools by name.

    Args:
        tools_config: Tool name to its settings, a tool object or a function; or just names.
        in_sandbox: Whether `search` alone searches a sandbox instead of the working directory.

    Raises:
        ValueError: No tool has the name.
    """
    if tools_config is None:
        return {}
    if not isinstance(tools_config, Mapping):
        tools_config = dict.fromkeys(tools_config)
    tools_config = _with_search_beside_others(tools_config, in_sandbox=in_sandbox)
    return {name: _make_tool(name, value) for name, value in tools_config.items()}


def _with_search_beside_others(
    tools_config: Mapping[str, Any], *, in_sandbox: bool
) -> Mapping[str, Any]:
    """Let `search` without a place of its own search where commands run and files are edited."""
    own = {} if tools_config.get("search") in (None, True) else tools_config["search"]
    is_placed = not isinstance(own, Mapping) or any(own.get(key) for key in ("root", "sandbox"))
    if "search" not in tools_config or is_placed:
        return tools_config
    others = [tools_config[name] for name in _WITH_FILES if name in tools_config]
    if not others and not in_sandbox:
        return tools_config
    places = [
        {key: other[key] for key in _PLACE if key in other}
        for other in others
        if isinstance(other, Mapping)
    ]
    place = next(filter(None, places), {})
    return {**tools_config, "search": {"sandbox": "auto", **place, **own}}


def _make_tool(name: str, value: Any) -> Any:
    if value is None or value is True:
        return get_global_tool_registry().get_tool(name)
    if isinstance(value, Mapping):
        return get_global_tool_registry().get_tool(name, value)
    return checked_tool(name, value)
