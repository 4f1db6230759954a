from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from workers.core.base_tool import BaseAgenticTool, SimpleAgenticTool
from workers.core.function_tool import as_tool
from workers.core.tool_prompt import tools_text
from workers.core.tool_registry import (
    ToolRegistry,
    create_tools,
    get_global_tool_registry,
    register_tool,
    register_tool_function,
    register_tool_instance,
    tool,
)
from workers.core.tool_schemas import ToolCallInfo, ToolResult, create_openai_tool_schema
from workers.tools.calculator_tool import CalculatorTool


class Counter(BaseAgenticTool):
    def __init__(self, config=None):
        super().__init__(config, create_openai_tool_schema("counter", "Counts.", {}))

    async def execute_tool(self, instance_id, parameters, **kwargs):
        state = self.instance_state(instance_id)
        state["n"] = state.get("n", 0) + self.config.get("step", 1)
        return ToolResult(success=True, result=state["n"])

    async def calculate_reward(self, instance_id, **kwargs):
        return float(self.instance_state(instance_id).get("n", 0))


def test_the_global_registry_knows_the_built_in_tools():
    names = get_global_tool_registry().get_tool_names()
    assert names == ["bash_executor", "calculator", "file_editor", "finish", "search"]
    schemas = get_global_tool_registry().get_tool_schemas(["calculator", "finish"])
    assert [schema.function.name for schema in schemas] == ["calculator", "finish"]


async def test_a_tools_state_is_created_used_rewarded_and_released():
    registry = ToolRegistry()
    registry.register_tool(Counter, {"step": 2})
    instance_id = await registry.create_tool_instance("counter")
    other_id = await registry.create_tool_instance("counter", "other")
    assert (await registry.execute_tool("counter", instance_id, {})).result == 2
    call = ToolCallInfo(tool_name="counter", instance_id=instance_id)
    assert (await registry.execute_tool_call(call)).result == 4
    assert await registry.calculate_tool_reward("counter", instance_id) == 4.0
    assert await registry.calculate_tool_reward("counter", other_id) == 0.0
    await registry.release_tool_instance("counter", instance_id)
    await registry.release_all_instances()
    assert registry.get_tool("counter").get_tool_info()["active_instances"] == 0


async def test_running_a_tool_by_name_never_raises():
    class Fails(SimpleAgenticTool):
        def __init__(self, config=None):
            super().__init__("fails", "", {})

        async def simple_execute(self, parameters):
            raise RuntimeError("boom")

    registry = ToolRegistry()
    registry.register_tool_instance(Fails())
    assert (await registry.execute_tool("fails", "i", {})).error == "RuntimeError: boom"
    unknown = await registry.execute_tool("nothing", "i", {})
    assert "Unknown tool: nothing. Known tools: fails" in (unknown.error or "")


def test_a_name_is_given_once_unless_replaced():
    with pytest.raises(ValueError, match="'calculator' is registered already"):
        register_tool(CalculatorTool)
    register_tool(Counter, name="calculator", replace=True)
    assert isinstance(get_global_tool_registry().get_tool("calculator"), Counter)
    get_global_tool_registry().clear_registry()
    assert isinstance(get_global_tool_registry().get_tool("calculator"), CalculatorTool)


def test_a_tool_without_a_name_needs_one():
    class Plain:
        def execute(self):
            return 1

    with pytest.raises(ValueError, match="Plain has no name"):
        register_tool_instance(Plain())
    assert register_tool_instance(Plain(), "plain") == "plain"


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
    assert create_tools(None) == {}
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
    function = registry.get_tool_schema("area").to_openai()["function"]
    assert function["description"] == "Compute an area."
    parameters = function["parameters"]
    assert parameters["required"] == ["corner"]
    assert parameters["properties"]["unit"]["enum"] == ["m", "km"]
    assert parameters["properties"]["unit"]["default"] == "m"
    assert parameters["properties"]["unit"]["description"] == "Unit of length."
    result = await registry.execute_tool("area", "i", {"corner": {"x": "2", "y": 3}, "unit": "km"})
    assert result.result == "6.0 km2"
    wrong = await registry.execute_tool("area", "i", {"corner": {"x": 1}, "schema": 0})
    assert "schema: Input should be greater than or equal to 1" in (wrong.error or "")


async def test_names_descriptions_and_further_arguments_are_up_to_the_author():
    @tool(name="look_up", description="Finds.")
    async def find(query: str, **options):
        return {"query": query, **options}

    registry = get_global_tool_registry()
    assert registry.get_tool_schema("look_up").function.description == "Finds."
    result = await registry.execute_tool("look_up", "i", {"query": "q", "depth": 2})
    assert result.result == {"query": "q", "depth": 2}
    with pytest.raises(ValueError, match="look_up"):
        register_tool_function(find, "look_up")


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
        as_tool(scope["f"])


def test_tools_are_described_with_kinds_and_choices():
    text = tools_text([get_global_tool_registry().get_tool_schema("finish")])
    assert text.startswith(
        "- finish(answer?: string, status?: 'success' | 'failure'): End the task"
    )
    assert "    answer: The result of the task." in text
