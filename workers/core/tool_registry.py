"""Tools by name: the built-in ones, registered classes, objects and decorated functions.

Used by agents that are built from a `tools_config` and by the worker, where messages name tools.
Built-in tools are imported at their first use. Must not: need a running event loop.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from workers.core.function_tool import FunctionTool
from workers.core.options import OptionError, check_options
from workers.core.tool_call import checked_tool

BUILTIN_TOOLS: Mapping[str, str] = {
    "bash_executor": "workers.tools.bash_executor_tool:BashExecutorTool",
    "calculator": "workers.tools.calculator_tool:CalculatorTool",
    "file_editor": "workers.tools.file_editor_tool:FileEditorTool",
    "finish": "workers.tools.finish_tool:FinishTool",
    "search": "workers.tools.search_tool:SearchTool",
}

Function = TypeVar("Function", bound=Callable[..., Any])


class ToolRegistry:
    """Tool classes and objects by name.

    Args:
        builtin: Names that are always there, each with its import path `module:Class`.
    """

    def __init__(self, builtin: Mapping[str, str] | None = None) -> None:
        self._builtin = dict(builtin or {})
        self._classes: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._tools: dict[str, Any] = {}
        # Plug-in modules may be imported from another thread than the event loop's.
        self._lock = threading.RLock()

    def register_tool(
        self,
        tool_class: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> str:
        """Register a tool class under a name, its object's own when None; returns the name.

        Raises:
            ValueError: The name is taken.
        """
        settings = dict(config or {})
        if name is None:
            tool = tool_class(settings) if settings else tool_class()
            return self.register_tool_instance(tool)
        with self._lock:
            self._require_free(name)
            self._classes[name] = (tool_class, settings)
        return name

    def register_tool_instance(self, instance: Any, name: str | None = None) -> str:
        """Register a tool object under its own name or the one given; returns the name.

        Raises:
            ValueError: The name is taken, or there is none.
        """
        name = name or getattr(instance, "name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{type(instance).__name__} has no name: pass name=")
        with self._lock:
            self._require_free(name)
            self._tools[name] = instance
        return name

    def get_tool_names(self) -> list[str]:
        """Return all names, sorted."""
        with self._lock:
            return sorted({*self._builtin, *self._classes, *self._tools})

    def get_tool(self, name: str, config: Mapping[str, Any] | None = None) -> Any:
        """Return the tool; with a config a new object of its class with these settings.

        Raises:
            ValueError: No tool has the name, or a setting does not fit, see `check_config`.
        """
        with self._lock:
            if not config and name in self._tools:
                return self._tools[name]
            self.check_config(name, config or {})
            tool_class, settings = self._class_of(name)
            settings = {**settings, **(config or {})}
            tool = tool_class(settings) if settings else tool_class()
            if not config:
                self._tools[name] = tool
            return tool

    def check_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Check a tool's settings against the options of its class.

        Raises:
            OptionError: One is not known or of a wrong type, or the tool was registered as an
                object and takes none.
            ValueError: No tool has the name.
        """
        with self._lock:
            if name in self._tools.keys() - self._classes.keys() - self._builtin.keys():
                if config:
                    raise OptionError(
                        f"tool {name!r} is an object already made: it takes no config"
                    )
                return
            tool_class, _ = self._class_of(name)
            known = getattr(tool_class, "__dict__", {}).get("options")
            check_options(f"Tool {name!r}", config, known)

    def clear_registry(self) -> None:
        """Remove all registered tools; the built-in ones stay."""
        with self._lock:
            self._classes.clear()
            self._tools.clear()

    def _require_free(self, name: str) -> None:
        if name in self.get_tool_names():
            raise ValueError(f"a tool named {name!r} is registered already; choose another name")

    def _class_of(self, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        if name in self._classes:
            return self._classes[name]
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            return getattr(importlib.import_module(module), attribute), {}
        raise ValueError(f"Unknown tool: {name}. Known tools: {', '.join(self.get_tool_names())}")


_global_registry = ToolRegistry(BUILTIN_TOOLS)


def get_global_tool_registry() -> ToolRegistry:
    """Return the registry of this process, which has the built-in tools."""
    return _global_registry


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Function], Function]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
) -> Any:
    """Register the decorated function as a tool, as `@tool` or `@tool(name="other")`.

    The function is returned unchanged and can be called and tested as before.
    """

    def register(decorated: Function) -> Function:
        _global_registry.register_tool_instance(FunctionTool(decorated, name, description))
        return decorated

    return register(function) if function is not None else register


def create_tools(tools_config: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    """Return tools by name.

    Args:
        tools_config: Tool name to its settings, a tool object or a function; or just names.

    Raises:
        ValueError: No tool has the name.
    """
    if tools_config is None:
        return {}
    if not isinstance(tools_config, Mapping):
        return {name: _global_registry.get_tool(name) for name in tools_config}
    return {name: _make_tool(name, value) for name, value in tools_config.items()}


def _make_tool(name: str, value: Any) -> Any:
    if value is None or value is True:
        return _global_registry.get_tool(name)
    if isinstance(value, Mapping):
        return _global_registry.get_tool(name, value)
    return checked_tool(name, value)
