"""The output of commands: JSON documents, tables, errors, questions.

Results go to stdout, everything else to stderr. Text from models or datasets goes through
`safe_text`, so that it cannot send control codes to the terminal.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.contract.errors import NotAllowed

if TYPE_CHECKING:
    from rich.console import Console

E_MUST_ASK = "E131"

#: Control characters except tab and newline, and those that change the writing direction.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write_in_any_encoding() -> None:
    """Escape characters that the locale's encoding lacks, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _writes_unicode(stream):
            stream.reconfigure(errors="replace")


def print_json(document: Any) -> None:
    """Print one document on stdout."""
    # Escape control codes for a terminal only; a program needs the text unchanged.
    is_escaped = sys.stdout.isatty() or not _writes_unicode(sys.stdout)
    text = json.dumps(document, ensure_ascii=is_escaped, default=str)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def fields(value: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a value as a document."""
    return {name: getattr(value, name) for name in names}


def print_answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print a JSON document or a sentence."""
    if as_json:
        print_json(document)
    else:
        print(text)


def print_error(
    code: str, what: str, why: str = "", remedy: str = "", *, as_json: bool = False
) -> None:
    """Print an error with its reason and remedy."""
    message = " ".join(part for part in (what, why) if part)
    if as_json:
        print_json({"error": {"code": code, "message": message, "remedy": remedy}})
        return
    sys.stdout.flush()
    line = " ".join(part for part in (code, message, remedy) if part)
    sys.stderr.write(safe_text(line) + "\n")


def note(text: str) -> None:
    """Print a note to stderr."""
    sys.stderr.write(safe_text(text) + "\n")
    sys.stderr.flush()


def safe_text(text: str) -> str:
    """Return text with all terminal control codes escaped."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def console(stream: TextIO | None = None) -> Console:
    """Return a console that writes control codes to terminals only."""
    from rich.console import Console

    target: TextIO = stream or sys.stdout
    is_terminal = target.isatty()
    return Console(
        file=target,
        force_terminal=None if is_terminal else False,
        color_system="auto" if is_terminal else None,
        width=None if is_terminal else 160,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    right: Iterable[str] = (),
) -> None:
    """Print rows under headings on stdout; columns in `right` are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    right = set(right)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(safe_text("" if cell is None else str(cell))) for cell in row))
    console().print(table)


def print_fields(title: str, values: dict[str, Any]) -> None:
    """Print a table of names and values; empty values are left out."""
    print_table(
        (title, "value"),
        [
            (name, value if isinstance(value, (str, int, float)) else json.dumps(value))
            for name, value in values.items()
            if value not in (None, {}, [])
        ],
    )


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation of an irreversible action.

    Raises:
        NotAllowed: The input is not a terminal, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotAllowed(
            f"{question} No answer is possible: this is not a terminal.",
            remedy="Repeat the command with --yes.",
            code=E_MUST_ASK,
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotAllowed("Nothing was changed.", code=E_MUST_ASK)


def _writes_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "utf-8").lower().replace("-", "") == "utf8"


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure for a table, a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def counts(by_name: dict[str, int]) -> str:
    """Return `3 failed, 2 queued`; names with a count of 0 are left out."""
    return ", ".join(f"{n} {name}" for name, n in by_name.items() if n) or "none"


def did(participle: str, dry_run: bool) -> str:
    """Return `are dropped`, or for a dry run `would be dropped`."""
    return f"would be {participle}" if dry_run else f"are {participle}"
