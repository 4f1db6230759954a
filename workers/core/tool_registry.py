"""Tools by name: the built-in ones, registered classes, objects and decorated functions.

Used by agents built from a `tools_config` and by the worker, where messages name tools. Built-in
tools are imported when first asked for. Must not: need a running event loop to be set up or to be
cleared.
"""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from workers.core.base_tool import BaseAgenticTool
from workers.core.function_tool import FunctionTool, as_tool
from workers.core.options import OptionError, check_options
from workers.core.tool_call import invoke_tool
from workers.core.tool_schemas import OpenAIFunctionToolSchema, ToolCallInfo, ToolResult

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
        self._owners: dict[str, str] = {}
        # Plug-in modules may be imported from another thread than the event loop's.
        self._lock = threading.RLock()

    def register_tool(
        self,
        tool_class: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        *,
        replace: bool = False,
    ) -> str:
        """Register a tool class; the object is made when it is first used. Returns the name.

        Raises:
            ValueError: The name is taken and `replace` is false.
        """
        settings = dict(config or {})
        if name is None:
            tool = tool_class(settings) if settings else tool_class()
            return self.register_tool_instance(tool, replace=replace)
        with self._lock:
            self._claim(name, replace)
            self._classes[name] = (tool_class, settings)
        return name

    def register_tool_instance(
        self, instance: Any, name: str | None = None, *, replace: bool = False
    ) -> str:
        """Register a tool object under its own name or the one given; returns the name.

        Raises:
            ValueError: The name is taken and `replace` is false, or there is none.
        """
        name = name or getattr(instance, "name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{type(instance).__name__} has no name: pass name=")
        with self._lock:
            self._claim(name, replace)
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
        """Check a tool's settings against what its class states to take.

        Raises:
            OptionError: One is not known or of a wrong type, or the tool was registered as an
                object and takes none.
            ValueError: No tool has the name.
        """
        with self._lock:
            is_made = name in self._tools and name not in self._classes
            if config and is_made and name not in self._builtin:
                raise OptionError(f"tool {name!r} is an object already made: it takes no config")
            if not is_made or name in self._builtin:
                tool_class, _ = self._class_of(name)
                known = getattr(tool_class, "__dict__", {}).get("options")
                check_options(f"Tool {name!r}", config, known)

    def get_tool_schema(self, name: str) -> OpenAIFunctionToolSchema:
        """Return one tool's schema.

        Raises:
            ValueError: No tool has the name.
        """
        return self.get_tool(name).get_openai_tool_schema()

    def get_tool_schemas(
        self, names: Sequence[str] | None = None
    ) -> list[OpenAIFunctionToolSchema]:
        """Return the schemas of the named tools; of all when None."""
        return [self.get_tool_schema(name) for name in names or self.get_tool_names()]

    async def create_tool_instance(
        self, name: str, instance_id: str | None = None, **kwargs: Any
    ) -> str:
        """Begin a tool's state for one trajectory; returns its id."""
        tool = self.get_tool(name)
        instance_id = instance_id or uuid.uuid4().hex
        if create := getattr(tool, "create_instance", None):
            instance_id = await create(instance_id, **kwargs)
        self._owners[str(instance_id)] = name
        return str(instance_id)

    async def execute_tool(
        self, name: str, instance_id: str, params: Mapping[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Run one tool; a failure of any kind is a result with success=False."""
        try:
            tool = self.get_tool(name)
        except ValueError as error:
            return ToolResult(success=False, error=str(error))
        return await invoke_tool(tool, instance_id, dict(params), **kwargs)

    async def execute_tool_call(self, call: ToolCallInfo) -> ToolResult:
        """Run a call given as data."""
        instance_id = call.instance_id or uuid.uuid4().hex
        return await self.execute_tool(call.tool_name, instance_id, call.parameters)

    async def calculate_tool_reward(self, name: str, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's own reward for the trajectory; 0.0 where it has none."""
        calculate = getattr(self.get_tool(name), "calculate_reward", None)
        return float(await calculate(instance_id, **kwargs)) if calculate else 0.0

    async def release_tool_instance(self, name: str, instance_id: str, **kwargs: Any) -> None:
        """End a tool's state for one trajectory."""
        self._owners.pop(instance_id, None)
        if release := getattr(self.get_tool(name), "release_instance", None):
            await release(instance_id, **kwargs)

    async def release_all_instances(self) -> None:
        """End every state that `create_tool_instance` began."""
        for instance_id, name in list(self._owners.items()):
            await self.release_tool_instance(name, instance_id)

    def clear_registry(self) -> None:
        """Forget all that was registered; built-in tools are there again at the next use."""
        with self._lock:
            self._classes.clear()
            self._tools.clear()
            self._owners.clear()

    def _claim(self, name: str, replace: bool) -> None:
        if name in self.get_tool_names() and not replace:
            raise ValueError(
                f"a tool named {name!r} is registered already; choose another name "
                "or pass replace=True"
            )
        self._classes.pop(name, None)
        self._tools.pop(name, None)

    def _class_of(self, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        if name in self._classes:
            return self._classes[name]
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            return getattr(importlib.import_module(module), attribute), {}
        raise ValueError(f"Unknown tool: {name}. Known tools: {', '.join(self.get_tool_names())}")


_global_registry = ToolRegistry(BUILTIN_TOOLS)


def get_global_tool_registry() -> ToolRegistry:
    """Return the process's registry; it knows the built-in tools."""
    return _global_registry


def register_tool(
    tool_class: Callable[..., Any],
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
    *,
    replace: bool = False,
) -> str:
    """Register a tool class in the global registry."""
    return _global_registry.register_tool(tool_class, config, name, replace=replace)


def register_tool_instance(instance: Any, name: str | None = None, *, replace: bool = False) -> str:
    """Register a tool object in the global registry."""
    return _global_registry.register_tool_instance(instance, name, replace=replace)


def register_tool_function(
    function: Callable[..., Any],
    name: str | None = None,
    description: str | None = None,
    *,
    replace: bool = False,
) -> FunctionTool:
    """Make a typed function a tool of the global registry and return that tool."""
    made = as_tool(function, name, description)
    _global_registry.register_tool_instance(made, replace=replace)
    return made


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, replace: bool = False
) -> Callable[[Function], Function]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    replace: bool = False,
) -> Any:
    """Register the decorated function as a tool, as `@tool` or `@tool(name="other")`.

    The function itself is returned unchanged and can be called and tested as before.
    """

    def register(decorated: Function) -> Function:
        register_tool_function(decorated, name, description, replace=replace)
        return decorated

    return register(function) if function is not None else register


def create_tools(
    tools_config: Mapping[str, Any] | Sequence[str] | None,
    registry: ToolRegistry | None = None,
) -> dict[str, Any]:
    """Return tools by name.

    Args:
        tools_config: Tool name to its settings, a tool object or a function; or just names.
        registry: Where names are looked up; the global one when None.

    Raises:
        ValueError: No tool has the name.
    """
    registry = registry or _global_registry
    if tools_config is None:
        return {}
    if not isinstance(tools_config, Mapping):
        return {name: registry.get_tool(name) for name in tools_config}
    return {name: _make_tool(name, value, registry) for name, value in tools_config.items()}


def _make_tool(name: str, value: Any, registry: ToolRegistry) -> Any:
    if value is None or value is True:
        return registry.get_tool(name)
    if isinstance(value, Mapping):
        return registry.get_tool(name, value)
    if isinstance(value, BaseAgenticTool) or hasattr(value, "execute"):
        return value
    return as_tool(value, name)
