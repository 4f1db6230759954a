"""What is printed cannot drive a terminal, and asks before it cannot be taken back."""

from __future__ import annotations

import io
import json
import sys

import pytest

from pipeline.contract.errors import NotAllowed
from rollout.output import (
    confirm,
    print_error,
    print_json,
    print_table,
    safe_text,
    write_in_any_encoding,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("char", ["\x1b", "\x00", "\x07", "\x9b", "\x7f", "\r", "\u202e", "\u2066"])
def test_control_characters_are_made_visible(char):
    assert safe_text(f"a{char}b") not in (f"a{char}b", "ab")
    assert char not in safe_text(f"a{char}b")


def test_plain_text_stays_as_it_is():
    text = "Zürich\t→ 42\nfine 🙂"
    assert safe_text(text) == text


def test_json_for_a_terminal_is_ascii_and_for_a_program_is_not(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    print_json({"text": "\x9b31m ü"})
    assert terminal.getvalue().isascii()
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    print_json({"text": "\x9b31m ü"})
    assert json.loads(pipe.getvalue()) == {"text": "\x9b31m ü"}
    assert "ü" in pipe.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_that_lacks_a_character_is_no_error(encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    write_in_any_encoding()
    print_json({"text": "± →"})
    print_table(("prompt",), [("1 → 2",)])
    sys.stdout.flush()
    document, _, table = written.getvalue().partition(b"\n")
    assert json.loads(document) == {"text": "± →"}
    assert b"1 ? 2" in table


def test_a_table_in_a_pipe_has_no_control_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(("name", "value"), [("a", "[red]x[/red]\x1b[31m"), ("b", None)], right=("value",))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]x[/red]" in shown


def test_a_table_obeys_no_color_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    print_table(("name",), [("a",)])
    assert "\x1b[3" not in terminal.getvalue()


def test_an_error_is_one_line_on_stderr_or_a_document_on_stdout(capsys):
    print_error("E201", "Redis refused.", "Nobody listens.", "Start it: rollout up")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "E201 Redis refused. Nobody listens. Start it: rollout up\n",
    )
    print_error("E201", "Redis refused.", "Nobody listens.", "Start it", as_json=True)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert json.loads(shown.out) == {
        "error": {
            "code": "E201",
            "message": "Redis refused. Nobody listens.",
            "remedy": "Start it",
        }
    }


def test_without_a_terminal_nothing_is_done_unasked(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(NotAllowed, match="--yes") as refused:
        confirm("Cancel 5 rollouts?", yes=False)
    assert refused.value.exit_code == 7
    confirm("Cancel 5 rollouts?", yes=True)


@pytest.mark.parametrize(
    ("answer", "goes_on"), [("y", True), ("YES", True), ("", False), ("n", False)]
)
def test_only_a_yes_is_a_yes(monkeypatch, answer, goes_on):
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    if goes_on:
        confirm("Sure?", yes=False)
    else:
        with pytest.raises(NotAllowed):
            confirm("Sure?", yes=False)
