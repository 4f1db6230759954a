"""The group of all commands: listed from a table, imported when one of them is called.

`app.py` uses it. The plain-text help has the same groups as Typer's help on a terminal. Must not:
contain the names of commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


class CommandGroup(TyperGroup):
    """Commands in groups; a subclass sets the table."""

    #: Titles of groups → names of commands → place of the function, first line of the help.
    table: ClassVar[Mapping[str, Mapping[str, tuple[str, str]]]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for title, listed in self.table.items():
            for name, (_, summary) in listed.items():
                self.commands[name] = TyperCommand(name, help=summary, rich_help_panel=title)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the arguments name."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and self._imported(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each group below its title."""
        width = max(map(len, self.commands))
        for title, listed in self.table.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), line) for name, (_, line) in listed.items()]
                )

    def _imported(self, name: str) -> Any:
        place, summary = next(listed[name] for listed in self.table.values() if name in listed)
        module, _, attribute = place.partition(":")
        found = getattr(import_module(f"rollout.commands.{module}"), attribute)
        parent = typer.Typer(rich_markup_mode=self.rich_markup_mode)
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=name, help=summary)
        else:
            parent.command(name)(found)
        return typer.main.get_group(parent).commands[name]
