"""Tools by name: the built-in ones, registered classes, objects and decorated functions.

Used by agents that are built from a `tools_config` and by the worker, where messages name tools.
Built-in tools are imported at their first use. Must not: need a running event loop.
"""

from __future__ import annotations

import pkgutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from workers.core.function_tool import FunctionTool
from workers.core.options import OptionError, check_options
from workers.core.tool_call import invoke_tool, release_tool, tool_schema
from workers.core.tool_schemas import OpenAIFunctionToolSchema, ToolResult

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
            ValueError: The name is that of a tool of another class.
        """
        settings = dict(config or {})
        if name is None:
            tool = tool_class(settings) if settings else tool_class()
            return self.register_tool_instance(tool)
        with self._lock:
            self._require_free(name, tool_class)
            self._tools.pop(name, None)
            self._classes[name] = (tool_class, settings)
        return name

    def register_tool_instance(self, instance: Any, name: str | None = None) -> str:
        """Register a tool object under its own name or the one given; returns the name.

        Raises:
            ValueError: The name is that of a tool of another class, or there is none.
        """
        name = name or getattr(instance, "name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{type(instance).__name__} has no name: pass name=")
        with self._lock:
            self._require_free(name, type(instance))
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

    def get_tool_schemas(
        self, names: Sequence[str] | None = None
    ) -> list[OpenAIFunctionToolSchema]:
        """Return the schemas of these tools, of all when None."""
        chosen = self.get_tool_names() if names is None else names
        return [tool_schema(name, self.get_tool(name)) for name in chosen]

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

    async def create_tool_instance(self, name: str, instance_id: str | None = None) -> str:
        """Return the id of a tool's new state, for `execute_tool` and `release_tool_instance`."""
        self.get_tool(name)
        return instance_id or uuid.uuid4().hex

    async def execute_tool(
        self, name: str, instance_id: str, parameters: Mapping[str, Any]
    ) -> ToolResult:
        """Run a tool once; a failure of any kind, also an unknown name, is a failed result."""
        try:
            tool = self.get_tool(name)
        except ValueError as error:
            return ToolResult(success=False, error=str(error))
        return await invoke_tool(tool, instance_id, dict(parameters))

    async def release_tool_instance(self, name: str, instance_id: str) -> None:
        """End a tool's state."""
        await release_tool(self.get_tool(name), instance_id)

    def _require_free(self, name: str, tool_class: Callable[..., Any]) -> None:
        """Allow the same class again, with other settings; raise for another class."""
        if name not in self.get_tool_names():
            return
        is_made = name not in self._classes and name not in self._builtin
        own = type(self._tools[name]) if is_made else self._class_of(name)[0]
        # All functions have one class, so only their names distinguish them.
        if own is not tool_class or own is FunctionTool:
            raise ValueError(f"a tool named {name!r} is registered already; choose another name")

    def _class_of(self, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        if name in self._classes:
            return self._classes[name]
        if name in self._builtin:
            return pkgutil.resolve_name(self._builtin[name]), {}
        raise ValueError(f"Unknown tool: {name}. Known tools: {', '.join(self.get_tool_names())}")


_global_registry = ToolRegistry(BUILTIN_TOOLS)


def get_global_tool_registry() -> ToolRegistry:
    """Return the registry of this process, which has the built-in tools."""
    return _global_registry


def register_tool(
    tool_class: Callable[..., Any],
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> str:
    """Register a tool class in this process's registry, see `ToolRegistry.register_tool`."""
    return _global_registry.register_tool(tool_class, config, name)


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    replay: Literal["again", "recorded"] = "again",
) -> Callable[[Function], Function]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    replay: Literal["again", "recorded"] = "again",
) -> Any:
    """Register the decorated function as a tool, as `@tool` or `@tool(name="other")`.

    The function is returned unchanged and can be called and tested as before. With
    `replay="recorded"` a resumed rollout gets recorded results instead of running it again.
    """

    def register(decorated: Function) -> Function:
        _global_registry.register_tool_instance(FunctionTool(decorated, name, description, replay))
        return decorated

    return register(function) if function is not None else register
