"""How commands end: exit codes, and errors for people or for programs."""

from __future__ import annotations

import json

import pytest

from pipeline.contract.errors import ServiceUnavailable
from pipeline.contract.url_secrets import hide_secret
from rollout import app as command_line
from rollout.app import run_command


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def end_with(monkeypatch, error: BaseException, *arguments: str) -> int:
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(command_line, "_invoke", fail)
    return run_command(["status", *arguments])


def error_of(capsys) -> dict[str, str]:
    return json.loads(capsys.readouterr().out)["error"]


def test_a_usage_error_is_2_and_names_the_help(capsys):
    assert run_command(["submit"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("E002 Missing argument 'DATASET'.")
    assert "rollout submit --help" in shown.err
    assert run_command(["submit", "--json"]) == 2
    assert error_of(capsys)["code"] == "E002"


def test_an_unknown_command_and_an_unknown_option_are_usage_errors(capsys):
    assert run_command(["fly"]) == 2
    assert "fly" in capsys.readouterr().err
    assert run_command(["status", "--fly"]) == 2
    assert "--fly" in capsys.readouterr().err


def test_no_command_shows_the_help_and_is_a_usage_error(capsys):
    assert run_command([]) == 2
    assert "Maintenance:" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rollout 0.")


def test_our_errors_end_with_their_exit_code_and_all_three_parts(monkeypatch, capsys):
    error = ServiceUnavailable("It is down.", why="Nobody listens.", remedy="Start it.")
    assert end_with(monkeypatch, error, "--json") == 6
    assert error_of(capsys) == {
        "code": "E200",
        "message": "It is down. Nobody listens.",
        "remedy": "Start it.",
    }
    assert end_with(monkeypatch, error) == 6
    assert capsys.readouterr().err == "E200 It is down. Nobody listens. Start it.\n"


def test_a_bug_is_1_with_its_traceback_on_stderr(monkeypatch, capsys):
    assert end_with(monkeypatch, RuntimeError("first line\nsecond line"), "--json") == 1
    shown = capsys.readouterr()
    assert "Traceback" in shown.err
    assert json.loads(shown.out)["error"]["code"] == "E001"
    assert "second line" not in shown.out


def test_an_interruption_is_130(monkeypatch, capsys):
    assert end_with(monkeypatch, KeyboardInterrupt()) == 130
    assert "Interrupted" in capsys.readouterr().err


def test_an_interruption_inside_a_command_is_130_too(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.settings.load_settings", interrupt)
    assert run_command(["status", "--json"]) == 130
    assert error_of(capsys)["code"] == "E003"


def test_a_setting_that_cannot_work_is_3(monkeypatch, capsys):
    monkeypatch.setenv("ROLLOUT_WORKER__CONCURENCY", "3")
    assert run_command(["config", "show", "--json"]) == 3
    assert "concurrency" in error_of(capsys)["remedy"]


def test_reading_in_an_empty_folder_creates_nothing(tmp_path, capsys):
    assert run_command(["status", "--json"]) == 2
    assert error_of(capsys)["code"] == "E121"
    assert list(tmp_path.iterdir()) == []


def test_settings_are_shown_with_their_origin_and_without_their_secrets(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "rollout.toml").write_text("[worker]\nconcurrency = 7\n")
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", "postgresql://me:hush@db/x")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hush")
    assert run_command(["--data-dir", "there", "config", "show", "--origin", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "hush" not in shown
    settings = json.loads(shown)["settings"]
    assert settings["worker.concurrency"] == {
        "value": 7,
        "origin": str(tmp_path / "rollout.toml"),
    }
    assert settings["database.url"] == {
        "value": "postgresql://me:***@db/x",
        "origin": "environment",
    }
    assert settings["llm.api_key"] == {"value": "***", "origin": "environment aliases"}
    assert settings["data_dir"] == {"value": "there", "origin": "flags"}
    assert settings["broker.prefix"]["origin"] == "default"


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("sk-123", "***"),
        ("redis://localhost/0", "redis://localhost/0"),
        ("redis://:pw@host:1/0", "redis://:***@host:1/0"),
        ("postgresql://u@h/d?password=pw", "postgresql://u@h/d?password=***"),
    ],
)
def test_of_an_address_only_the_password_is_hidden(secret, shown):
    assert hide_secret(secret) == shown
