"""Secrets are found wherever they stand, and nothing else is touched."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.trajectory import TrajectoryRecord, pack_record, unpack_record
from pipeline.queue.gateway_keys import GatewayKey, GatewayKeys
from pipeline.redaction import MASK, Redactor, redact_logs
from pipeline.settings import load_settings

KEY = 'sk-"quoted\\key"-ä1234567'


@pytest.fixture
def redacted_log() -> Iterator[io.StringIO]:
    """What a handler writes while the log of this process is redacted."""
    before = logging.getLogRecordFactory()
    redact_logs(Redactor([KEY]))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("leaky")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_a_gateway_key_is_gone_although_no_setting_holds_it(redacted_log):
    content = GatewayKey(
        group_id=uuid4(),
        run_id=uuid4(),
        run="r",
        rollout_id=uuid4(),
        attempt_no=1,
        label="r-g000001-r0-a1",
        expires_at=0,
        model="m",
    )
    key = GatewayKeys(b"secret").write(content)
    text = f'{{"_rollout": {{"api_key": "{key}"}}, "error": "401 for {key}."}}'
    for redacted in (Redactor().text(text), Redactor().data(text.encode()).decode()):
        assert redacted == f'{{"_rollout": {{"api_key": "{MASK}"}}, "error": "401 for {MASK}."}}'
    logging.getLogger("leaky").warning("called with %s", key)
    assert redacted_log.getvalue() == f"called with {MASK}\n"
    assert Redactor().text("rpk-short and a sentence. rpk-") == "rpk-short and a sentence. rpk-"


@given(before=st.text(), after=st.text())
def test_a_secret_is_gone_from_text_and_json_however_deep(before, after):
    redactor = Redactor([KEY])
    text = f"{before}{KEY}{after}"
    assert KEY not in redactor.text(text)
    once = json.dumps({"arguments": text}, ensure_ascii=False)
    twice = json.dumps({"call": once}, ensure_ascii=False)
    for document in (once, twice):
        kept = redactor.data(document.encode("utf-8", "surrogatepass")).decode(
            "utf-8", "surrogatepass"
        )
        json.loads(kept)
        assert "quoted" not in kept or "quoted" in before + after


@given(st.text())
def test_text_without_secrets_is_untouched(text):
    if KEY not in text:
        assert Redactor([KEY]).text(text) == text


def test_secrets_come_from_settings_environment_and_urls(tmp_path):
    settings = load_settings(
        overrides={
            "llm": {"api_key": "sk-of-the-settings"},
            "database": {"url": "postgresql://u:db%2Fpassword1@h/n"},
            "broker": {"url": "redis://:brokerpassword@h/0", "signing_key": "signing-key-1"},
        },
        start=tmp_path,
    )
    environ = {
        "MY_API_KEY": "sk-of-the-env",
        "HF_TOKEN": "hf_0123456789",
        "SOME_URL": "https://user:url-password@h/",
        "HOME": "/home/somebody",
    }
    redactor = Redactor.of(settings, environ)
    for secret in (
        "sk-of-the-settings",
        "db/password1",
        "db%2Fpassword1",
        "brokerpassword",
        "signing-key-1",
        "sk-of-the-env",
        "hf_0123456789",
        "url-password",
    ):
        assert redactor.text(f"a {secret} b") == f"a {MASK} b", secret
    for word in ("/home/somebody", "redis", "user"):
        assert redactor.text(word) == word


@pytest.mark.parametrize("password", ["guest", "postgres", "password"])
def test_a_password_everybody_knows_is_hidden_in_urls_only(tmp_path, password):
    url = f"amqp://user:{password}@h//"
    settings = load_settings(overrides={"broker": {"url": url}}, start=tmp_path)
    redactor = Redactor.of(settings, {})
    assert redactor.text(f"at {url}") == f"at amqp://user:{MASK}@h//"
    assert redactor.text(f"The {password} arrived.") == f"The {password} arrived."


def test_short_values_and_placeholders_are_no_secrets(tmp_path):
    settings = load_settings(overrides={"llm": {"api_key": "EMPTY"}}, start=tmp_path)
    redactor = Redactor.of(settings, {"X_API_KEY": "not-needed", "TOKENIZER_TOKEN": "false"})
    assert redactor.text("EMPTY not-needed false") == "EMPTY not-needed false"


def test_a_stored_trajectory_holds_no_secret_and_is_whole():
    record = TrajectoryRecord(
        messages=[{"role": "assistant", "content": f"key: {KEY}", "n": 1}],
        metadata={"deep": {"arguments": json.dumps({"k": KEY})}},
    )
    stored = unpack_record(pack_record(record, redact=Redactor([KEY]).data))
    assert stored.messages == [{"role": "assistant", "content": f"key: {MASK}", "n": 1}]
    assert json.loads(stored.metadata["deep"]["arguments"])["k"] == MASK


def test_log_lines_and_tracebacks_hold_no_secret(redacted_log):
    logger = logging.getLogger("leaky")
    logger.error("key %s", KEY)
    logger.error("no key: %d", 3)
    try:
        raise RuntimeError(f"with {KEY}")
    except RuntimeError:
        logger.exception("it broke")
    said = redacted_log.getvalue()
    assert "quoted" not in said
    assert f"key {MASK}\nno key: 3\nit broke\nTraceback" in said
    assert f"RuntimeError: with {MASK}" in said


def test_redacting_logs_twice_knows_the_newer_secrets(redacted_log):
    redact_logs(Redactor(["another-secret"]))
    logging.getLogger("leaky").error("another-secret")
    assert redacted_log.getvalue() == f"{MASK}\n"
