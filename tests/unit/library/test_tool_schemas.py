import threading

import pytest

from workers.core.base_tool import BaseAgenticTool, SimpleAgenticTool
from workers.core.tool_schemas import (
    ToolResult,
    as_tool_result,
    create_openai_tool_schema,
    parameter_problems,
)

SCHEMA = create_openai_tool_schema(
    "resize",
    "Resize a picture.",
    {
        "width": {"type": "integer"},
        "mode": {"type": "string", "enum": ["fit", "fill"]},
        "labels": {"type": "array", "items": {"type": "string"}},
        "box": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    required=["width"],
)


def test_a_schema_is_shown_in_the_openai_format():
    shown = SCHEMA.to_openai()
    assert shown["type"] == "function"
    assert shown["function"]["name"] == "resize"
    assert shown["function"]["parameters"]["required"] == ["width"]
    assert shown["function"]["parameters"]["properties"]["mode"]["enum"] == ["fit", "fill"]


def test_a_whole_json_schema_is_taken_as_it_is():
    whole = {
        "type": "object",
        "properties": {"type": {"type": "string"}},
        "required": ["type"],
        "$defs": {"A": {"type": "string"}},
    }
    shown = create_openai_tool_schema("f", "", whole).to_openai()["function"]["parameters"]
    assert shown == whole


@pytest.mark.parametrize(
    "params",
    [
        {"width": 3},
        {"width": 3.0},
        {"width": 3, "mode": "fit", "labels": ["a"], "box": {"x": 1.5}},
        {"width": 3, "name": None},
    ],
)
def test_fitting_parameters_pass(params):
    assert parameter_problems(params, SCHEMA) == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "missing required parameter 'width'"),
        ({"width": "3"}, "width must be of type integer, not str"),
        ({"width": True}, "width must be of type integer, not bool"),
        ({"width": 3, "mode": "cut"}, "mode must be one of 'fit', 'fill'"),
        ({"width": 3, "labels": ["a", 1]}, "labels[1] must be of type string"),
        ({"width": 3, "box": {}}, "missing required parameter box.'x'"),
        ({"width": 3, "name": 4}, "none of the allowed kinds"),
        ({"width": 3, "height": 4}, "unknown parameter 'height'; known parameters: width"),
        ([3], "must be an object"),
    ],
)
def test_each_misfit_is_named(params, words):
    assert words in "; ".join(parameter_problems(params, SCHEMA))


class Doubler(SimpleAgenticTool):
    def __init__(self):
        super().__init__("double", "Doubles.", {"n": {"type": "integer"}}, ["n"])

    def simple_execute(self, parameters):
        return {"value": parameters["n"] * 2, "thread": threading.current_thread().name}


async def test_a_sync_method_runs_in_a_thread_of_its_own():
    result = await Doubler().execute_tool("i", {"n": 4})
    assert result.success
    assert result.result["value"] == 8
    assert result.result["thread"] == "sync-call"


async def test_wrong_parameters_are_a_failed_result_not_an_exception():
    result = await Doubler().execute_tool("i", {"n": "4"})
    assert not result.success
    assert "n must be of type integer" in (result.error or "")


async def test_state_belongs_to_one_instance_and_goes_with_it():
    tool = Doubler()
    tool.instance_state("first")["seen"] = 1
    assert tool.instance_state("second") == {}
    await tool.release_instance("first")
    await tool.release_instance("never used")
    assert tool.instance_state("first") == {}


def test_a_tool_without_a_schema_says_how_to_give_one():
    class Bare(BaseAgenticTool):
        async def execute_tool(self, instance_id, parameters, **kwargs):
            return ToolResult(success=True)

    with pytest.raises(NotImplementedError, match="pass tool_schema"):
        Bare().get_openai_tool_schema()


def test_a_dict_that_says_it_failed_is_not_a_success():
    assert as_tool_result({"success": False, "error": "no"}).error == "no"
    assert as_tool_result({"success": False, "detail": 1}).success is False
    assert as_tool_result({"value": 1}) == ToolResult(success=True, result={"value": 1})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(success=True, result="plain"), "plain"),
        (ToolResult(success=True, result={"a": [1, 2]}), '{"a": [1, 2]}'),
        (ToolResult(success=True), "(no output)"),
        (ToolResult(success=False, error="boom"), "Error: boom"),
        (ToolResult(success=False), "Error: the tool failed and gave no reason"),
    ],
)
def test_the_model_is_shown_text(result, text):
    assert result.to_text() == text
