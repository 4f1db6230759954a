"""Commands as documents write them, held against the command line without running anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from rollout.app import app, run_command

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def commands_in(document: Path) -> Iterator[str]:
    """Yield each line of a plain or shell block that calls `rollout`."""
    language: str | None = None
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language in ("", "sh"):
            call = re.search(r"(?:^|\s)(rollout [a-z].*)", line.partition("#")[0])
            if call:
                yield call[1].strip()


def mentions_in(document: Path) -> Iterator[str]:
    """Yield each command that the running text names, as far as it is spelt out."""
    text = " ".join(document.read_text(encoding="utf-8").split())
    for mention in re.findall(r"`(rollout [a-z][^`]*)`", text):
        yield re.split(r"[…\[]", mention)[0].strip()


def require_parses(words: Sequence[str]) -> None:
    """Parse a command as a shell would give it; whatever does not fit is an error."""
    assert words[0] == "rollout", words
    command: Any = typer.main.get_command(app)
    name, rest, context = "rollout", list(words[1:]), None
    while hasattr(command, "commands"):
        context = command.make_context(name, rest, parent=context)
        rest = [*context._protected_args, *context.args]
        assert rest, f"{' '.join(words)} names no command"
        name, rest = rest[0], rest[1:]
        assert name in command.commands, f"there is no command {name}: {' '.join(words)}"
        command = command.resolve_command(context, [name])[1]
    command.make_context(name, rest, parent=context)


def require_named(words: Sequence[str]) -> None:
    """Check a command that may be cut short: what it names is there, arguments may be missing."""
    try:
        require_parses(words)
    except Exception as error:
        if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise


def require_help(words: Sequence[str]) -> None:
    """Ask the command for its help, up to its first option or argument."""
    path = list(words[1:2])
    if path[0] in ("db", "config", "show", "dlq", "limits"):
        path += words[2:3]
    assert run_command([*path, "--help"]) == 0


def words_of(line: str) -> list[str]:
    return shlex.split(line)
