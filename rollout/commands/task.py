"""`rollout task`: check coding tasks before a model works on them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

import typer

from pipeline.contract.errors import InputError
from producers.datasets import read_prompts
from rollout.deployment import settings_of
from rollout.known_names import require_known
from rollout.options import Json
from rollout.output import print_json, print_table
from rollout.run_options import E_OPTION, SubmitOptions, run_config
from workers.agents.coding_agent import CodingAgent
from workers.agents.task_check import check_tasks
from workers.core.registry import get_agent_class
from workers.sandbox.kinds import set_default_kind

EXIT_BAD_TASKS = 2
_LONGEST = 300

task = typer.Typer(no_args_is_help=True)


@task.command("check")
def check(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A dataset of coding tasks.")],
    agent: Annotated[str, typer.Option(metavar="NAME", help="coding or swe.")] = "coding",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="As of `rollout run`: agent_config."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="At once.")] = 4,
    as_json: Json = False,
) -> None:
    """Check that tasks start, fail untouched and pass once solved.

    No model is called. The exit code is 2 if a task has a problem.
    """
    settings = settings_of(ctx)
    set_default_kind(settings.worker.sandbox)
    config = run_config(SubmitOptions(file, agent=agent, set=set_, reward="none"), settings.run)
    require_known(config, plugins=settings.worker.plugins)
    agent_object = get_agent_class(config.agent)(**config.agent_config)
    if not isinstance(agent_object, CodingAgent):
        raise InputError(f"Agent {config.agent!r} has no tasks with tests.", code=E_OPTION)
    prompts = list(read_prompts(file, limit=limit))
    checks = asyncio.run(check_tasks([each.payload for each in prompts], agent_object, concurrency))
    rows = [
        {"task": prompt.payload.get("id", prompt.row_no), **asdict(found)}
        for prompt, found in zip(prompts, checks, strict=True)
    ]
    is_good = not any(row["problem"] for row in rows)
    if as_json:
        print_json({"ok": is_good, "tasks": rows})
    else:
        _print_checks(rows)
    raise typer.Exit(0 if is_good else EXIT_BAD_TASKS)


def _print_checks(rows: list[dict[str, Any]]) -> None:
    shown = {True: "yes", False: "no", None: "–"}
    columns = ("starts", "untouched_fails", "gold_passes")
    print_table(
        ("task", "starts", "untouched fails", "gold patch passes", "problem"),
        [
            (row["task"], *(shown[row[name]] for name in columns), _one_line(row["problem"]))
            for row in rows
        ],
    )
    bad = sum(bool(row["problem"]) for row in rows)
    print(f"{len(rows)} tasks, {bad} with a problem.")


def _one_line(problem: str) -> str:
    line = " ".join(problem.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
