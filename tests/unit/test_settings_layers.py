"""Settings: where a value comes from, and what is said about one that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.contract.errors import ConfigError
from pipeline.settings import Settings, load_settings, settings_layers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below" / "deep").mkdir(parents=True)
    return tmp_path


def write(folder: Path, text: str, name: str = "rollout.toml") -> None:
    (folder / name).write_text(text, encoding="utf-8")


def test_nothing_configured_means_private_servers(folder):
    settings = load_settings(start=folder)
    assert settings.embedded_database
    assert settings.embedded_broker
    assert settings.model_dump() == Settings().model_dump()


def test_a_file_is_found_upwards(folder):
    write(folder, "[worker]\nconcurrency = 7")
    assert load_settings(start=folder / "below" / "deep").worker.concurrency == 7


def test_the_nearest_file_wins(folder):
    write(folder, "[worker]\nconcurrency = 7")
    write(folder / "below", "[worker]\nconcurrency = 8")
    assert load_settings(start=folder / "below" / "deep").worker.concurrency == 8


LAYERS = ["file", "profile", "dotenv", "alias", "environment", "flags"]


@pytest.mark.parametrize("highest", range(1, len(LAYERS) + 1))
def test_each_source_wins_over_those_below_it(folder, monkeypatch, highest):
    present = LAYERS[:highest]
    toml = '[llm]\nbase_url = "http://file"\n'
    if "profile" in present:
        toml += '[profile.big.llm]\nbase_url = "http://profile"\n'
        monkeypatch.setenv("ROLLOUT_PROFILE", "big")
    write(folder, toml)
    if "dotenv" in present:
        write(folder, "ROLLOUT_LLM__BASE_URL=http://dotenv\n", ".env")
    if "alias" in present:
        monkeypatch.setenv("OPENAI_BASE_URL", "http://alias")
    if "environment" in present:
        monkeypatch.setenv("ROLLOUT_LLM__BASE_URL", "http://environment")
    overrides = {"llm": {"base_url": "http://flags"}} if "flags" in present else None
    settings = load_settings(overrides=overrides, start=folder)
    assert settings.llm.base_urls == (f"http://{present[-1]}",)


def test_sections_are_merged_field_by_field(folder, monkeypatch):
    write(folder, "[lease]\nlease_s = 12\ngrace_s = 3\n")
    monkeypatch.setenv("ROLLOUT_LEASE__GRACE_S", "4")
    lease = load_settings(overrides={"lease": {"poll_s": 5.0}}, start=folder).lease
    assert (lease.lease_s, lease.grace_s, lease.poll_s) == (12, 4, 5)


def test_flags_that_were_not_given_hide_nothing(folder):
    write(folder, "[worker]\nconcurrency = 7")
    overrides = {"worker": {"concurrency": None}, "profile": None}
    assert load_settings(overrides=overrides, start=folder).worker.concurrency == 7


def test_each_layer_can_be_shown_with_its_name(folder, monkeypatch):
    write(folder, "[profile.big.worker]\nconcurrency = 500")
    monkeypatch.setenv("ROLLOUT_PROFILE", "big")
    names = [name for name, layer in settings_layers(start=folder) if layer]
    assert "[profile.big]" in names
    assert "environment" in names


def test_a_setting_of_earlier_versions_is_accepted_with_a_warning(folder, caplog):
    write(folder, "[llm]\ncapture_tokens = true\nmax_retries = 3")
    assert load_settings(start=folder).llm.max_retries == 3
    assert "llm.capture_tokens has no effect any more" in caplog.text


def test_a_dotenv_file_may_hold_other_tools_names(folder):
    write(folder, "DJANGO_SECRET=x\nOPENAI_API_KEY=sk-planted\n", ".env")
    settings = load_settings(start=folder)
    assert settings.llm.api_key is not None
    assert settings.llm.api_key.get_secret_value() == "sk-planted"


def test_secrets_are_not_shown(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted")
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", "postgresql://me:hunter2@db/x")
    shown = repr(load_settings(start=folder))
    assert "sk-planted" not in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        ("[worker]\nconcurency = 7", r"no setting worker\.concurency.*Did you mean 'concurrency'"),
        ("[wroker]\nconcurrency = 7", r"no setting wroker.*Did you mean 'worker'"),
        ("[worker]\nxyzzy = 7", r"no setting worker\.xyzzy.*Known names:.*concurrency"),
        ("[worker]\nconcurrency = 0", r"worker\.concurrency cannot be 0.*greater than or equal"),
        ("[lease]\nlease_s = 'long'", r"lease\.lease_s cannot be 'long'.*ROLLOUT_LEASE__LEASE_S"),
        ("log_level = 'LOUD'", r"log_level cannot be 'LOUD'.*'DEBUG'"),
        ("profile = 'big'", r"profile = 'big'.*ROLLOUT_PROFILE"),
        ("[worker\n", r"is not valid TOML"),
        ("[worker]\nconcurrency = 1\nconcurrency = 2", r"is not valid TOML"),
    ],
    ids=[
        "misspelt-field",
        "misspelt-section",
        "unknown-field",
        "too-small",
        "wrong-type",
        "no-choice",
        "profile-chosen-in-file",
        "no-toml",
        "twice",
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_remedy(folder, toml, what):
    write(folder, toml)
    with pytest.raises(ConfigError, match=what):
        load_settings(start=folder)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("my_plugin.py", ("my_plugin.py",)),
        ("a, b,c ,", ("a", "b", "c")),
        ('["a,b", "c"]', ("a,b", "c")),
        ("", ()),
    ],
)
@pytest.mark.parametrize("source", ["environment", "dotenv", "file"])
def test_a_list_is_written_with_commas_or_as_json(folder, monkeypatch, text, names, source):
    if source == "environment":
        monkeypatch.setenv("ROLLOUT_WORKER__PLUGINS", text)
    elif source == "dotenv":
        write(folder, f"ROLLOUT_WORKER__PLUGINS='{text}'\n", ".env")
    else:
        write(folder, f"[worker]\nplugins = '{text}'\n")
    assert load_settings(start=folder).worker.plugins == names


@pytest.mark.parametrize("source", ["environment", "dotenv"])
@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("ROLLOUT_WORKER__PLUGINS=[a", r"worker\.plugins cannot be '\[a'.*ROLLOUT_WORKER__PLUGINS"),
        ("ROLLOUT_WORKER=500", "setting worker cannot be 500"),
        ("ROLLOUT_WORKER=a", "section.*worker.*ROLLOUT_WORKER__CONCURRENCY"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(folder, monkeypatch, source, variable, what):
    if source == "environment":
        monkeypatch.setenv(*variable.split("="))
    else:
        write(folder, variable + "\n", ".env")
    with pytest.raises(ConfigError, match=what):
        load_settings(start=folder)


def test_fields_of_runs_are_kept_as_they_are_written(folder, monkeypatch):
    write(folder, "[run]\nn = 4\n[run.on_error]\nagent_bug = 'fail'\n")
    monkeypatch.setenv("ROLLOUT_RUN__ON_ERROR__SANDBOX", "fail")
    monkeypatch.setenv("ROLLOUT_RUN__MAX_ATTEMPTS", "5")
    assert load_settings(start=folder).run == {
        "n": 4,
        "max_attempts": "5",
        "on_error": {"agent_bug": "fail", "sandbox": "fail"},
    }


def test_a_misspelt_variable_is_an_error_and_not_ignored(folder, monkeypatch):
    monkeypatch.setenv("ROLLOUT_DATABSE__URL", "postgresql://x")
    with pytest.raises(ConfigError, match=r"ROLLOUT_DATABSE__URL.*Did you mean 'database'"):
        load_settings(start=folder)


def test_a_misspelt_field_of_a_variable_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("ROLLOUT_DATABASE__ULR", "postgresql://x")
    with pytest.raises(ConfigError, match=r"no setting database\.ulr.*Did you mean 'url'"):
        load_settings(start=folder)


def test_an_unknown_profile_names_those_there_are(folder):
    write(folder, "[profile.big.worker]\nconcurrency = 500")
    with pytest.raises(ConfigError, match=r"\[profile\.bgi\].*Known profiles: big"):
        load_settings(overrides={"profile": "bgi"}, start=folder)


def test_settings_cannot_be_changed_after_they_were_made(folder):
    settings = load_settings(start=folder)
    with pytest.raises(ValidationError, match="frozen"):
        settings.worker.concurrency = 3  # pyright: ignore[reportAttributeAccessIssue]


def fields(model, path=()):
    for name, field in model.model_fields.items():
        nested = getattr(field.annotation, "model_fields", None)
        if nested:
            yield from fields(field.annotation, (*path, name))
        else:
            yield ".".join((*path, name)), field


@pytest.mark.parametrize(("name", "field"), list(fields(Settings)))
def test_every_setting_says_what_it_is_and_has_a_default(name, field):
    assert not field.is_required()
    assert (field.description or "").endswith("."), name
