"""The offline policy's answer key: questions of a dataset with their gold answers.

The server loads it once at start, then looks entries up by the text of a message. Must not: score.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import InputError
from workers.llm.json_text import JsonError, parse_json
from workers.offline_policy.arithmetic import is_computable

_GOLD_MARK = "####"
_ANNOTATION = re.compile(r"<<([^<>=]+)=[^<>]*>>")
_REMEMBERED_LOOKUPS = 20_000


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One question: its text as in the file, the final answer, and a calculation towards it."""

    question: str
    final: str
    marked: bool  #: the gold answer stood after `####`
    expression: str | None


class AnswerKey:
    """Finds gold answers by question."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = {entry.question: entry for entry in entries}
        # Longest first: a question may be contained in another one.
        self._by_length = sorted(self._entries.values(), key=lambda e: -len(e.question))
        self._contained: dict[str, KeyEntry | None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def exact(self, text: str) -> KeyEntry | None:
        """Return the entry whose question is this text."""
        return self._entries.get(text)

    def contained_in(self, text: str) -> KeyEntry | None:
        """Return the entry with the longest question that the text contains."""
        if text in self._contained:
            return self._contained[text]
        entry = next((e for e in self._by_length if e.question in text), None)
        if len(self._contained) >= _REMEMBERED_LOOKUPS:
            self._contained.clear()
        self._contained[text] = entry
        return entry


def load_answer_key(path: Path, *, prompt_field: str, answer_field: str) -> AnswerKey:
    """Read a JSONL file of questions and answers.

    Raises:
        InputError: The file cannot be read, a line is not a JSON object, or a field is missing.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(
            f"The answer key {path} cannot be read.",
            why=f"{error.strerror}.",
            remedy="Check --answer-key.",
        ) from error
    return AnswerKey(
        _entry(line, f"{path}:{number}", prompt_field, answer_field)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def _entry(line: bytes, where: str, prompt_field: str, answer_field: str) -> KeyEntry:
    try:
        row = parse_json(line)
    except JsonError as error:
        raise InputError(f"{where} is not JSON.", why=f"{error}.") from None
    if not isinstance(row, Mapping):
        raise InputError(f"{where} is no JSON object.")
    return key_entry(_field(row, prompt_field, where), _field(row, answer_field, where))


def key_entry(question: str, answer: str) -> KeyEntry:
    """Make one entry; the final answer is the text after `####`, else the whole answer."""
    before, mark, after = answer.rpartition(_GOLD_MARK)
    return KeyEntry(
        question=question.strip(),
        final=(after if mark else answer).strip(),
        marked=bool(mark),
        expression=_last_calculation(before),
    )


def _last_calculation(working: str) -> str | None:
    for match in reversed(_ANNOTATION.findall(working)):
        if is_computable(match):
            return match.strip()
    return None


def _field(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if value is None:
        raise InputError(
            f"{where} has no field {name!r}.",
            why=f"Its fields are {', '.join(map(repr, row))}.",
            remedy="Check --prompt-field and --answer-field.",
        )
    return str(value)
