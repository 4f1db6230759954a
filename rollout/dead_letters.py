"""The dead letters that `rollout dlq requeue` and `drop` select, and the output of `rollout dlq`.

Must not: change a dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from sqlalchemy import Connection

from pipeline.contract.errors import InputError
from pipeline.store.dead_letters import DeadLetter, get_dead_letter, list_dead_letters
from rollout.deployment import Deployment
from rollout.options import DryRun, Json, Yes
from rollout.output import confirm, print_json, print_table, safe_text

#: Bytes of a message that are printed.
_SHOWN_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Selection:
    """The dead letters that a command changes, and the options of such a command."""

    ids: Annotated[
        list[int] | None, typer.Argument(metavar="[ID]...", help="Numbers, see `rollout dlq list`.")
    ] = None
    every: Annotated[
        bool, typer.Option("--all", help="All that have not been requeued.", show_default=False)
    ] = False
    yes: Yes = False
    dry_run: DryRun = False
    as_json: Json = False

    def confirmed(self, deployment: Deployment, question: str) -> list[DeadLetter]:
        """Return the selected dead letters after the question; a dry run does not ask."""
        letters = deployment.transact(self._read)
        if letters and not self.dry_run:
            confirm(question.format(len(letters)), yes=self.yes)
        return letters

    def _read(self, connection: Connection) -> list[DeadLetter]:
        if bool(self.ids) == self.every:
            raise InputError("Name dead letters by their numbers, or say --all.", code="E104")
        if self.every:
            return list_dead_letters(connection, limit=1_000_000)
        return [get_dead_letter(connection, number) for number in dict.fromkeys(self.ids or ())]


def print_letters(letters: Sequence[DeadLetter], *, as_json: bool) -> None:
    """Print one line per dead letter."""
    if as_json:
        print_json({"dead_letters": [_document(letter) for letter in letters]})
        return
    print_table(
        ("id", "kind", "of", "bytes", "first seen", "requeued", "reason"),
        [
            (
                letter.dead_letter_id,
                letter.kind,
                letter.label or letter.run,
                letter.body_bytes or None,
                f"{letter.first_seen_at:%Y-%m-%d %H:%M:%S}",
                "yes" if letter.redriven_at else "",
                letter.reason,
            )
            for letter in letters
        ],
        right=("id", "bytes"),
    )


def print_letter(letter: DeadLetter, *, as_json: bool) -> None:
    """Print a dead letter with the beginning of its message."""
    document = _document(letter)
    body = (letter.body or b"")[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    if as_json:
        print_json(document | {"body": body})
        return
    for name, value in document.items():
        print(f"{name}: {safe_text(str(value))}")
    if body:
        print(f"\n{safe_text(body)}")


def print_requeued(
    letters: Sequence[DeadLetter], results: Sequence[str], *, dry_run: bool, as_json: bool
) -> None:
    """Print the result of each dead letter that was to be requeued."""
    rows = [
        {"id": letter.dead_letter_id, "kind": letter.kind, "result": result}
        for letter, result in zip(letters, results, strict=True)
    ]
    if as_json:
        print_json({"requeued": rows, "dry_run": dry_run})
    else:
        print_table(("id", "kind", "result"), [(*row.values(),) for row in rows], right=("id",))


def _document(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.dead_letter_id,
        "kind": letter.kind,
        "run": letter.run,
        "rollout_id": str(letter.rollout_id) if letter.rollout_id else None,
        "label": letter.label,
        "reason": letter.reason,
        "bytes": letter.body_bytes,
        "first_seen_at": letter.first_seen_at.isoformat(),
        "redriven_at": letter.redriven_at.isoformat() if letter.redriven_at else None,
    }
