"""The documents, held against the code: names, codes, tables, commands, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented_commands import (
    DOCUMENTS,
    ROOT,
    commands_in,
    mentions_in,
    require_named,
    require_parses,
    words_of,
)
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.contract.errors import ERROR_TABLE, Action, ErrorClass
from pipeline.contract.rollout import StopReason
from pipeline.contract.run import RunConfig
from pipeline.contract.train_batch import BatchSpec, PipelineStats, ResumeInfo
from pipeline.settings import _ALIASES, Settings
from pipeline.tokens.rows import TokenRow
from pipeline.trainer.async_client import AsyncTrainerClient
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch, TrainGroup, TrainRollout
from workers.core.registry import BUILTIN_AGENTS, get_agent_class
from workers.core.tool_registry import BUILTIN_TOOLS, get_global_tool_registry
from workers.rewards.registry import BUILTIN_REWARDS
from workers.rewards.reward_function import ALIASES, INPUTS

DOCS = ROOT / "docs"
RECORDS = sorted((DOCS / "adr").glob("*.md"))
MAX_RECORD_LINES = 40
MAX_ARCHITECTURE_LINES = 200


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row, headings included."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from fields(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, field


def shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(default) or "none"
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return "none" if default in (None, "", {}) else str(default)


def test_every_setting_is_listed_with_its_default() -> None:
    listed = {
        cells[0].strip("`"): cells[1]
        for cells in rows(read(DOCS / "settings.md"))
        if len(cells) == 3 and cells[0].startswith("`")
    }
    assert listed == {name: shown(field.default) for name, field in fields(Settings)}


def test_every_field_of_a_run_is_listed_with_its_default_and_meaning() -> None:
    listed = {
        cells[0].strip("`"): cells[1:]
        for cells in rows(read(DOCS / "runs.md"))
        if cells[0].startswith("`")
    }

    def default_of(field: FieldInfo) -> object:
        return field.get_default(call_default_factory=True, validated_data={})

    assert listed == {
        name: [shown(default_of(field)), field.description] for name, field in fields(RunConfig)
    }


def names_of(kind: type) -> set[str]:
    fields = getattr(kind, "__dataclass_fields__", ())
    return {name for name in (*dir(kind), *fields) if not name.startswith("_")}


def listed_in_training(heading: str) -> set[str]:
    table = read(DOCS / "training.md").partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {name for cells in rows(table) for name in re.findall(r"`(\w+)(?:\(.*?\))?`", cells[0])}


@pytest.mark.parametrize(
    "kind",
    [TrainBatch, TrainGroup, TrainRollout, TokenRow, BatchSpec, PipelineStats, ResumeInfo],
)
def test_every_field_that_a_trainer_uses_is_listed(kind: type) -> None:
    assert listed_in_training(f"field of `{kind.__name__}`") == names_of(kind)


def test_every_method_of_a_trainers_client_is_listed_and_awaitable() -> None:
    methods = names_of(TrainerClient) | {"lease_s"}
    assert listed_in_training("method of `TrainerClient`") == methods
    sync_only = {"lease_s", "next_step", "try_pull", "wait_for_groups"}
    assert names_of(AsyncTrainerClient) == (methods - sync_only) | {"prefetch"}


def test_what_a_reward_may_take_is_listed() -> None:
    text = read(DOCS / "agents.md").partition("## Rewards")[2]
    table = text[text.index("| parameter") :].partition("\n\n")[0]
    listed = {name for cells in rows(table) for name in re.findall(r"`(\w+)`", cells[0])}
    assert listed == {*INPUTS, *ALIASES}


@pytest.mark.parametrize("agent", BUILTIN_AGENTS)
def test_every_option_of_an_agent_is_listed_for_it(agent: str) -> None:
    text = read(DOCS / "agents.md")
    table = text[text.index("| option | agents |") :].partition("\n\n")[0]
    listed = {
        name
        for options, agents, *_ in rows(table)
        if agents == "all" or (f"`{agent}`" in agents) != agents.startswith("all but")
        for name in re.findall(r"`(\w+)`", options)
    }
    assert listed == set(get_agent_class(agent).known_options() or {})


@pytest.mark.parametrize("tool", BUILTIN_TOOLS)
def test_every_option_of_a_tool_is_listed_for_it(tool: str) -> None:
    text = read(DOCS / "agents.md")
    table = text[text.index("| tool | options |") :].partition("\n\n")[0]
    (cells,) = [cells for cells in rows(table) if cells[0] == f"`{tool}`"]
    listed = set(re.findall(r"`(\w+)`", cells[1]))
    assert listed == set(type(get_global_tool_registry().get_tool(tool)).options)


def test_every_other_tools_name_is_listed() -> None:
    text = read(DOCS / "settings.md")
    for name, (section, field) in _ALIASES.items():
        (row,) = [cells for cells in rows(text) if f"`{name}`" in cells[0]]
        assert row[1] == f"`{section}.{field}`"


def test_every_code_is_listed_and_no_other() -> None:
    code = re.compile(r"""["'](E\d{3})["']""")
    used = {
        found
        for package in ("rollout", "pipeline", "producers", "workers")
        for path in (ROOT / package).rglob("*.py")
        for found in code.findall(read(path))
    }
    listed = [cells[0] for cells in rows(read(DOCS / "errors.md")) if cells[0].startswith("`E")]
    assert len(listed) == len(set(listed))
    assert {cell.strip("`") for cell in listed} == used


def test_the_error_table_is_the_codes() -> None:
    text = read(DOCS / "errors.md")
    listed = {
        ErrorClass(cells[0].strip("`")): Action(cells[2].strip("`"))
        for cells in rows(text)
        if len(cells) == 4 and cells[0].strip("`") in list(ErrorClass)
    }
    assert listed == ERROR_TABLE
    for name in (*Action, *StopReason):
        assert f"`{name}`" in text


def test_the_architecture_can_be_read_at_one_sitting() -> None:
    assert len(read(DOCS / "architecture.md").splitlines()) <= MAX_ARCHITECTURE_LINES


@pytest.mark.parametrize("number", range(1, len(RECORDS) + 1))
def test_records_are_numbered_without_gaps_and_short(number: int) -> None:
    path = RECORDS[number - 1]
    lines = read(path).splitlines()
    assert path.name.startswith(f"{number:04d}-")
    assert lines[0].startswith(f"# {number:04d} ")
    assert len(lines) <= MAX_RECORD_LINES
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## Context", "## Decision", "## Consequences", "## Rejected"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_points_to_is_there(document: Path) -> None:
    text = read(document)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:pipeline|workers|producers|tests|migrations)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "line", sorted({line for document in DOCUMENTS for line in commands_in(document)})
)
def test_a_documented_command_is_one(line: str) -> None:
    require_parses(words_of(line))


@pytest.mark.parametrize(
    "mention", sorted({mention for document in DOCUMENTS for mention in mentions_in(document)})
)
def test_a_command_named_in_the_text_is_one(mention: str) -> None:
    require_named(words_of(mention))


def test_the_readme_names_what_is_built_in() -> None:
    text = " ".join(read(ROOT / "README.md").split())
    for builtin in (BUILTIN_AGENTS, BUILTIN_TOOLS, BUILTIN_REWARDS):
        for name in builtin:
            assert f"`{name}`" in text, name
