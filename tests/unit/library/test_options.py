"""Options of agents and tools: a misspelt one is an error that says what was meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.core.base_agent import BaseAgent
from workers.core.base_tool import SimpleAgenticTool
from workers.core.options import OptionError, check_options, options_of
from workers.core.registry import BUILTIN_AGENTS, check_agent_options, register_agent
from workers.core.tool_registry import BUILTIN_TOOLS, get_global_tool_registry
from workers.core.trajectory import Trajectory


class Silent(BaseAgent):
    """An agent of one's own: says nothing."""

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        return Trajectory(request_id)


def refusal_of(agent: str, **options: Any) -> str:
    with pytest.raises(OptionError) as refused:
        check_agent_options(agent, options)
    return str(refused.value)


@pytest.mark.parametrize("agent", BUILTIN_AGENTS)
def test_every_built_in_agent_says_what_was_meant(agent):
    said = refusal_of(agent, max_stpes=3)
    assert said == f"Agent {agent!r} has no option 'max_stpes'. Did you mean 'max_steps'?"
    said = refusal_of(agent, max_steps="abc")
    assert said.startswith(f"Agent {agent!r}: max_steps cannot be 'abc': Input should be a valid")
    common = {"max_steps": 3, "temperature": 1, "system_prompt": "Be brief.", "max_tool_calls": 2}
    check_agent_options(agent, {**common, "generate_kwargs": {"whatever": ["the", "server"]}})


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("react", {"require_thought_before_action": True, "max_consecutive_thoughts": 2}),
        ("tool", {"max_tool_calls_per_step": 2, "native_tools": False}),
        ("coding", {"sandbox": "process", "sandbox_limits": {"wall_s": 300}, "files": {"a": "b"}}),
        ("swe", {"image": "python:3.12", "test_timeout_s": 900, "sandbox_options": {"memory": 1}}),
    ],
)
def test_options_of_an_agent_and_of_those_it_derives_from_are_taken(agent, options):
    check_agent_options(agent, options)


def test_nested_options_are_checked_too():
    assert refusal_of("coding", sandbox_limits={"memory_byts": 1}) == (
        "Agent 'coding': sandbox_limits has no option 'memory_byts'. Did you mean 'memory_bytes'?"
    )
    assert "wall_s cannot be 'long'" in refusal_of("swe", sandbox_limits={"wall_s": "long"})
    assert "sandbox_limits cannot be 3" in refusal_of("coding", sandbox_limits=3)


def test_an_agent_of_ones_own_with_kwargs_takes_anything():
    register_agent("silent")(Silent)
    check_agent_options("silent", {"whatever": object(), "max_steps": "abc"})


def test_an_agent_of_ones_own_is_held_to_its_signature_or_to_the_options_it_states():
    class Signed(Silent):
        def __init__(self, max_tokens_per_step: int, style: str = "short") -> None:
            super().__init__(max_tokens_per_step=max_tokens_per_step)

    class Stated(Silent):
        options = {"style": str}  # noqa: RUF012

    register_agent("signed")(Signed)
    register_agent("stated")(Stated)
    for name in ("signed", "stated"):
        check_agent_options(name, {"style": "long"})
        assert "Did you mean 'style'?" in refusal_of(name, stile="long")
        assert "style cannot be 3" in refusal_of(name, style=3)
    check_agent_options("stated", {"temperature": 0.1})
    assert "no option 'temperature'" in refusal_of("signed", temperature=0.1)


async def test_options_of_a_function_are_its_parameters_with_a_default():
    @register_agent("greeter")
    async def greet(
        prompt: dict[str, Any], llm: Any, *, greeting: str = "Hello", n: int = 1
    ) -> str:
        return " ".join([greeting] * n)

    assert "Did you mean 'greeting'?" in refusal_of("greeter", greating="Hi")
    assert "n cannot be 'abc'" in refusal_of("greeter", n="abc")
    config = AgenticRolloutConfig(agent_type="greeter", agent_config={"greeting": "Hi", "n": 2})
    (trajectory,) = await AgenticRollout(config, lambda *_, **__: "").run_batch(["q"])
    assert trajectory.steps[-1].content == "Hi Hi"


@pytest.mark.parametrize("asks_for", ["config", "kwargs"])
def test_a_function_that_asks_for_its_config_takes_anything(asks_for):
    async def with_config(prompt: dict[str, Any], llm: Any, config: Any) -> str:
        return ""

    async def with_kwargs(prompt: dict[str, Any], llm: Any, **kwargs: Any) -> str:
        return ""

    register_agent("open")(with_config if asks_for == "config" else with_kwargs)
    check_agent_options("open", {"whatever": 1})


def test_the_library_checks_options_as_runs_do():
    with pytest.raises(OptionError, match="Did you mean 'native_tools'"):
        AgenticRollout(AgenticRolloutConfig(agent_config={"native_tool": True}))
    with pytest.raises(OptionError, match="Tool 'calculator' has no option 'presision'"):
        AgenticRollout(AgenticRolloutConfig(tools_config={"calculator": {"presision": 3}}))


@pytest.mark.parametrize("tool", BUILTIN_TOOLS)
def test_every_built_in_tool_refuses_a_setting_that_it_does_not_have(tool):
    with pytest.raises(OptionError, match=f"Tool '{tool}' has no option 'colour'"):
        get_global_tool_registry().check_config(tool, {"colour": "red"})


@pytest.mark.parametrize(
    ("tool", "config"),
    [
        ("bash_executor", {"timeout": 5, "env": {"A": "b"}, "limits": {"processes": 5}}),
        ("file_editor", {"root": "/tmp", "max_chars": 5}),
        ("search", {"max_results": 5, "sandbox": "process", "options": {}}),
        ("calculator", {"precision": 3}),
    ],
)
def test_settings_of_a_tool_are_taken_and_of_a_wrong_type_refused(tool, config):
    registry = get_global_tool_registry()
    registry.check_config(tool, config)
    for name in config.keys() - {"root", "sandbox"}:
        with pytest.raises(OptionError, match=f"{name} cannot be 'abc'"):
            registry.check_config(tool, {name: "abc"})


def test_a_tool_of_ones_own_takes_any_setting():
    class Mine(SimpleAgenticTool):
        def __init__(self, config: Mapping[str, Any] | None = None) -> None:
            super().__init__("mine", "Does it.", {}, config=config)

        def simple_execute(self, parameters: dict[str, Any]) -> str:
            return ""

    registry = get_global_tool_registry()
    registry.register_tool(Mine, name="mine")
    made = registry.get_tool("mine", {"whatever": 1})
    assert made.config == {"whatever": 1}


def test_only_types_of_json_are_judged():
    def takes(path: Mapping[str, int], when: complex = 0j, size: "Unknown" = 0) -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
        """Annotated by what no JSON value is, and by a name nobody knows."""

    known = options_of(takes)
    check_options("It", {"path": "abc", "when": "abc", "size": "abc"}, known)
    check_options("It", {"a": object(), "b": None}, {"a": int, "b": int})
    with pytest.raises(OptionError):
        check_options("It", {"a": True}, {"a": int})
