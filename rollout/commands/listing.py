"""`rollout list`: the agents, tools and rewards that are available here, with their options."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from rollout.deployment import settings_of
from rollout.options import Json
from rollout.output import print_json, safe_text
from rollout.registrations import KINDS, registered
from workers.process.plugins import load_plugins


def list_(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="agents|tools|rewards", help="What to list.")],
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Module or .py file with agents, tools, rewards."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List agents, tools or rewards with their options.

    The list has the built-in ones and those of the plug-ins. A run sets options by
    `--set agent_config.NAME=VALUE`, `tools_config.TOOL.NAME` and `reward_config.NAME`.
    """
    if kind not in KINDS:
        raise InputError(f"There is no list of {kind!r}.", remedy=f"Known: {', '.join(KINDS)}.")
    settings = settings_of(ctx)
    load_plugins(plugin or settings.worker.plugins)
    entries = list(registered(kind, settings))
    if as_json:
        print_json({kind: entries})
        return
    for entry in entries:
        print(safe_text(f"{entry['name']}: {entry['summary']}"))
        for option in entry["options"] or ():
            default = f" = {option['default']!r}" if "default" in option else ""
            print(safe_text(f"    {option['name']}: {option['type']}{default}"))
        if entry["options"] is None:
            print("    (any option)")
