"""The list of commands in `rollout --help`: named groups, also in plain text.

Typer draws groups for terminals only; a pipe gets the same groups from here. Must not: know which
commands there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typer.core import TyperGroup


class GroupedCommands(TyperGroup):
    """Commands in groups; a subclass names them, in the order of the help."""

    groups: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the groups."""
        return [name for commands in self.groups.values() for name in commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each group below its title."""
        width = max(map(len, self.list_commands(ctx)))
        # Two columns of indentation, and two between names and summaries.
        limit = formatter.width - width - 4
        for title, names in self.groups.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(limit))
                        for name in names
                    ]
                )
