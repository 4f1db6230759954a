"""`rollout list`: what a run may name here, with the options it may set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.command_line import CommandLine

from workers.core.registry import BUILTIN_AGENTS
from workers.core.tool_registry import BUILTIN_TOOLS
from workers.rewards.registry import BUILTIN_REWARDS

PLUGIN = '''
from workers.core.registry import register_agent
from workers.core.tool_registry import tool
from workers.rewards.registry import register_reward


@register_agent("echo")
async def echo(prompt, llm, *, times: int = 2):
    """Answer with the question. More words follow."""
    return prompt["content"] * times


@tool
def shout(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


@register_reward("length")
def length(response, answer, most: float = 10.0):
    return min(most, len(response))
'''


@pytest.fixture
def rollout(folder: Path) -> CommandLine:
    (folder / "mine.py").write_text(PLUGIN)
    return CommandLine(folder)


def listed(rollout: CommandLine, kind: str, *arguments: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in rollout.json("list", kind, *arguments)[kind]}


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [("agents", BUILTIN_AGENTS), ("tools", BUILTIN_TOOLS), ("rewards", BUILTIN_REWARDS)],
)
def test_what_is_built_in_is_listed_with_one_sentence_each(
    rollout: CommandLine, kind: str, builtin: Any
):
    found = listed(rollout, kind)
    assert set(found) == set(builtin)
    for each in found.values():
        assert each["summary"].endswith((".", "?")), each
        assert "\n" not in each["summary"]


def test_options_have_their_types_and_the_defaults_of_signatures(rollout: CommandLine):
    react = {each["name"]: each for each in listed(rollout, "agents")["react"]["options"]}
    assert react["max_steps"] == {"name": "max_steps", "type": "int", "default": 10}
    assert react["system_prompt"] == {"name": "system_prompt", "type": "str | None"}
    assert "    tolerance: float = 1e-06\n" in rollout("list", "rewards").out


def test_what_a_plugin_registers_is_listed_too(rollout: CommandLine):
    plugin = ("--plugin", "mine.py")
    echo = listed(rollout, "agents", *plugin)["echo"]
    assert echo["summary"] == "Answer with the question."
    assert {"name": "times", "type": "int", "default": 2} in echo["options"]
    assert listed(rollout, "tools", *plugin)["shout"]["options"] == []
    length = listed(rollout, "rewards", *plugin)["length"]
    assert length["summary"] == "(it has no docstring)"
    assert length["options"] == [{"name": "most", "type": "float", "default": 10.0}]
    named = {"ROLLOUT_WORKER__PLUGINS": '["mine.py"]'}
    assert "echo: Answer" in rollout("list", "agents", environment=named).out


def test_what_cannot_be_listed_is_refused(rollout: CommandLine):
    assert rollout.error("list", "models") == (2, "E110")
    assert rollout.error("list", "agents", "--plugin", "missing.py") == (3, "E101")
