from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from workers.core.base_tool import BaseAgenticTool
from workers.core.function_tool import FunctionTool
from workers.core.tool_prompt import tools_text
from workers.core.tool_registry import (
    ToolRegistry,
    get_global_tool_registry,
    register_tool,
    tool,
)
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema
from workers.core.tools_config import create_tools
from workers.tools.calculator_tool import CalculatorTool


class Counter(BaseAgenticTool):
    def __init__(self, config=None):
        super().__init__(config, create_openai_tool_schema("counter", "Counts.", {}))

    async def execute_tool(self, instance_id, parameters, **kwargs):
        state = self.instance_state(instance_id)
        state["n"] = state.get("n", 0) + self.config.get("step", 1)
        return ToolResult(success=True, result=state["n"])


def test_the_global_registry_knows_the_built_in_tools():
    names = get_global_tool_registry().get_tool_names()
    assert names == ["bash_executor", "calculator", "file_editor", "finish", "search"]


async def test_a_registered_class_is_made_with_its_settings_and_keeps_state_by_trajectory():
    registry = ToolRegistry()
    assert registry.register_tool(Counter, {"step": 2}) == "counter"
    counter = registry.get_tool("counter")
    for instance_id, n in (("a", 2), ("a", 4), ("b", 2)):
        assert (await counter.execute_tool(instance_id, {})).result == n


def test_a_name_is_that_of_one_class_until_the_registry_is_cleared():
    registry = get_global_tool_registry()
    with pytest.raises(ValueError, match="'calculator' is registered already"):
        registry.register_tool(Counter, name="calculator")
    registry.register_tool(Counter, name="mine")
    with pytest.raises(ValueError, match="'mine' is registered already"):
        registry.register_tool(CalculatorTool, name="mine")
    registry.clear_registry()
    assert "mine" not in registry.get_tool_names()
    assert isinstance(registry.get_tool("calculator"), CalculatorTool)


def test_a_class_is_registered_again_with_other_settings():
    registry = get_global_tool_registry()
    assert register_tool(CalculatorTool, {"precision": 3}) == "calculator"
    assert registry.get_tool("calculator").precision == 3
    for step in (2, 5):
        register_tool(Counter, {"step": step}, name="mine")
        assert registry.get_tool("mine").config == {"step": step}


async def test_a_tool_is_run_by_its_name_and_never_raises():
    registry = ToolRegistry()
    registry.register_tool(Counter, {"step": 2})
    instance_id = await registry.create_tool_instance("counter")
    assert (await registry.execute_tool("counter", instance_id, {})).result == 2
    assert (await registry.execute_tool("counter", instance_id, {})).result == 4
    await registry.release_tool_instance("counter", instance_id)
    assert (await registry.execute_tool("counter", instance_id, {})).result == 2
    unknown = await registry.execute_tool("nothing", instance_id, {})
    assert unknown.error == "Unknown tool: nothing. Known tools: counter"
    (schema,) = registry.get_tool_schemas()
    assert schema.function.name == "counter"


def test_a_tool_without_a_name_needs_one():
    class Plain:
        def execute(self):
            return 1

    registry = get_global_tool_registry()
    with pytest.raises(ValueError, match="Plain has no name"):
        registry.register_tool_instance(Plain())
    assert registry.register_tool_instance(Plain(), "plain") == "plain"


def test_a_config_makes_a_tool_of_its_own():
    precise = get_global_tool_registry().get_tool("calculator", {"precision": 3})
    assert precise.precision == 3
    assert get_global_tool_registry().get_tool("calculator").precision == 10


def test_tools_are_made_from_a_config_a_list_objects_and_functions():
    def twice(n: int) -> int:
        return 2 * n

    counter = Counter()
    tools = create_tools({"calculator": {"precision": 4}, "finish": {}, "c": counter, "t": twice})
    assert tools["calculator"].precision == 4
    assert tools["c"] is counter
    assert tools["t"].name == "t"
    assert list(create_tools(["calculator", "finish"])) == ["calculator", "finish"]
    with pytest.raises(ValueError, match=r"Unknown tool: nothing. Known tools: bash_executor"):
        create_tools(["nothing"])


class Point(BaseModel):
    x: float
    y: float = 0.0


async def test_a_decorated_function_becomes_a_tool_with_a_schema_of_its_signature():
    @tool
    def area(
        corner: Point, *, unit: Literal["m", "km"] = "m", schema: Annotated[int, Field(ge=1)] = 1
    ) -> str:
        """Compute an area.

        More about it.

        Args:
            corner: The far corner,
                from the origin.
            unit (str): Unit of length.
        """
        return f"{corner.x * corner.y * schema} {unit}2"

    assert area(Point(x=2, y=3)) == "6.0 m2"
    registry = get_global_tool_registry()
    area_tool = registry.get_tool("area")
    function = area_tool.get_openai_tool_schema().to_openai()["function"]
    assert function["description"] == "Compute an area."
    parameters = function["parameters"]
    assert parameters["required"] == ["corner"]
    assert parameters["properties"]["unit"]["enum"] == ["m", "km"]
    assert parameters["properties"]["unit"]["default"] == "m"
    assert parameters["properties"]["unit"]["description"] == "Unit of length."
    result = await area_tool.execute_tool("i", {"corner": {"x": "2", "y": 3}, "unit": "km"})
    assert result.result == "6.0 km2"
    wrong = await area_tool.execute_tool("i", {"corner": {"x": 1}, "schema": 0})
    assert "schema: Input should be greater than or equal to 1" in (wrong.error or "")


async def test_names_descriptions_and_further_arguments_are_up_to_the_author():
    @tool(name="look_up", description="Finds.")
    async def find(query: str, **options):
        return {"query": query, **options}

    look_up = get_global_tool_registry().get_tool("look_up")
    assert look_up.get_openai_tool_schema().function.description == "Finds."
    result = await look_up.execute_tool("i", {"query": "q", "depth": 2})
    assert result.result == {"query": "q", "depth": 2}
    with pytest.raises(ValueError, match="look_up"):
        tool(name="look_up")(find)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(a, /): ...", "parameter 'a' cannot be given by name"),
        ("def f(*a): ...", "parameter 'a' cannot be given by name"),
        ("def f(a: 'Nowhere'): ...", "an annotation is unknown"),
        ("def f(a: object()): ...", "cannot be a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_says_why(source, words):
    scope: dict = {}
    exec(source, scope)
    with pytest.raises(TypeError, match=words):
        FunctionTool(scope["f"])


def test_tools_are_described_with_kinds_and_choices():
    finish = get_global_tool_registry().get_tool("finish")
    text = tools_text([finish.get_openai_tool_schema()])
    assert text.startswith(
        "- finish(answer?: string, status?: 'success' | 'failure'): End the task"
    )
    assert "    answer: The result of the task." in text
