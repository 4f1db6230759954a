"""What commands print: JSON documents, tables, errors, questions.

Answers go to stdout, everything else to stderr. Text that came from a model or a dataset goes
through `safe_text`, so that it cannot drive a terminal.
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

#: Control characters other than tab and newline, and those that turn the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write_in_any_encoding() -> None:
    """Let no text fail for want of a character where the locale is not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _writes_unicode(stream):
            stream.reconfigure(errors="replace")


def print_json(document: Any) -> None:
    """Print one document on stdout."""
    # A terminal must not be driven by what stands in a text; a program wants the text.
    is_escaped = sys.stdout.isatty() or not _writes_unicode(sys.stdout)
    text = json.dumps(document, ensure_ascii=is_escaped, default=str)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def fields(value: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a value as a document."""
    return {name: getattr(value, name) for name in names}


def print_answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print a document for a program, else a sentence for a person."""
    if as_json:
        print_json(document)
    else:
        print(text)


def print_error(
    code: str, what: str, why: str = "", remedy: str = "", *, as_json: bool = False
) -> None:
    """Print what went wrong, why, and what to do."""
    message = " ".join(part for part in (what, why) if part)
    if as_json:
        print_json({"error": {"code": code, "message": message, "remedy": remedy}})
        return
    sys.stdout.flush()
    line = " ".join(part for part in (code, message, remedy) if part)
    sys.stderr.write(safe_text(line) + "\n")


def note(text: str) -> None:
    """Say something beside the answer."""
    sys.stderr.write(safe_text(text) + "\n")
    sys.stderr.flush()


def safe_text(text: str) -> str:
    """Return text with everything that could drive a terminal made visible."""
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
    """Print rows under headings on stdout; columns named in `right` hold numbers."""
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


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be taken back.

    Raises:
        NotAllowed: Nobody is there to answer, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotAllowed(
            f"{question} There is nobody to ask: this is not a terminal.",
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
    """Return a figure for a table, a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def counts(by_name: dict[str, int]) -> str:
    """Return `3 failed, 2 queued` for the names that have any."""
    return ", ".join(f"{n} {name}" for name, n in by_name.items() if n) or "none"
