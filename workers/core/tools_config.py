"""Makes the tools that a `tools_config` names, with their settings and a common directory.

Used by the agents and by the worker. Must not: register a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.core.tool_call import checked_tool
from workers.core.tool_registry import get_global_tool_registry

#: Tools whose directory `search` shares, and the settings that name the directory.
_FILE_TOOLS = ("bash_executor", "file_editor")
_DIRECTORY_SETTINGS = ("sandbox", "root", "limits", "options")


def create_tools(
    tools_config: Mapping[str, Any] | Sequence[str], *, in_sandbox: bool = False
) -> dict[str, Any]:
    """Return tools by name.

    Args:
        tools_config: Tool name to its settings, a tool object or a function; or just names.
        in_sandbox: Whether `search` alone searches a sandbox instead of the working directory.

    Raises:
        ValueError: No tool has the name.
    """
    if not isinstance(tools_config, Mapping):
        tools_config = dict.fromkeys(tools_config)
    tools_config = _with_shared_directory(tools_config, in_sandbox=in_sandbox)
    return {name: _make_tool(name, value) for name, value in tools_config.items()}


def _with_shared_directory(
    tools_config: Mapping[str, Any], *, in_sandbox: bool
) -> Mapping[str, Any]:
    """Give `search` without a directory of its own the one in which commands run."""
    own = {} if tools_config.get("search") in (None, True) else tools_config["search"]
    has_own = not isinstance(own, Mapping) or any(own.get(key) for key in ("root", "sandbox"))
    if "search" not in tools_config or has_own:
        return tools_config
    others = [tools_config[name] for name in _FILE_TOOLS if name in tools_config]
    if not others and not in_sandbox:
        return tools_config
    directories = [
        {key: other[key] for key in _DIRECTORY_SETTINGS if key in other}
        for other in others
        if isinstance(other, Mapping)
    ]
    shared = next(filter(None, directories), {})
    return {**tools_config, "search": {"sandbox": "auto", **shared, **own}}


def _make_tool(name: str, value: Any) -> Any:
    if value is None or value is True:
        return get_global_tool_registry().get_tool(name)
    if isinstance(value, Mapping):
        return get_global_tool_registry().get_tool(name, value)
    return checked_tool(name, value)
