"""The output of `rollout dlq`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.store.dead_letters import DeadLetter
from rollout.output import print_json, print_table, safe_text

#: Bytes of a message that are printed.
_SHOWN_BYTES = 2000


def print_letters(letters: Sequence[DeadLetter]) -> None:
    """Print one line per dead letter."""
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
    document = letter_document(letter)
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


def letter_document(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as `rollout dlq list --json` prints it."""
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
