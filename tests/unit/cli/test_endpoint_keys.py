"""Which endpoints a command tells its workers of, and which of them it sends a key to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.settings import Settings, load_settings
from rollout.endpoint import Endpoints, worker_environment

OWN, OTHER = "https://models.example/v1", "https://other.example/v1"
URL, ALLOWED = "ROLLOUT_LLM__BASE_URL", "ROLLOUT_WORKER__ALLOWED_BASE_URLS"


def settings_with(tmp_path: Any, base_url: str | None) -> Settings:
    llm = {"base_url": base_url, "api_key": "sk-own"}
    return load_settings(overrides={"llm": llm}, start=tmp_path)


@pytest.mark.parametrize(
    ("own", "called", "named", "told"),
    [
        # The key of the settings goes to the endpoints of the settings.
        (OWN, [OWN], [], {URL: [OWN]}),
        (OWN, [OWN + "/"], [OWN + "/"], {URL: [OWN]}),
        (f"{OWN},{OTHER}", [OWN, OTHER], [], {URL: [OWN, OTHER]}),
        # Another one may be called, without it.
        (OWN, [OTHER], [OTHER], {ALLOWED: [OTHER]}),
        (OWN, [OWN, OTHER], [OWN, OTHER], {ALLOWED: [OWN, OTHER]}),
        # Where the settings name none, the key is for what the command names.
        (None, [OTHER], [OTHER], {URL: [OTHER]}),
        # What only the store names gets no key.
        (None, [OTHER], [], {ALLOWED: [OTHER]}),
        (None, [OTHER], [OWN], {ALLOWED: [OTHER]}),
    ],
)
def test_a_key_goes_to_what_settings_or_options_name(tmp_path, own, called, named, told):
    settings = settings_with(tmp_path, own)
    environment = worker_environment(settings, Endpoints(tuple(called), None), named=named)
    assert {name: json.loads(value) for name, value in environment.items()} == told


def test_that_no_key_is_sent_is_said(tmp_path, capsys):
    settings = settings_with(tmp_path, None)
    worker_environment(settings, Endpoints((OTHER,), None), named=())
    assert f"No API key is sent to {OTHER}: only the run names it." in capsys.readouterr().err


def test_the_model_that_was_found_is_told_unless_the_settings_name_one(tmp_path):
    settings = settings_with(tmp_path, OWN)
    found = Endpoints((OWN,), "m")
    assert worker_environment(settings, found, named=())["ROLLOUT_LLM__MODEL"] == "m"
    llm = settings.llm.model_copy(update={"model": "mine"})
    environment = worker_environment(settings.model_copy(update={"llm": llm}), found, named=())
    assert "ROLLOUT_LLM__MODEL" not in environment
