"""Each setting that holds a URL gets passwords, in each place of a URL, and none is ever shown."""

from __future__ import annotations

import io
import json
import logging
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from sqlalchemy import text

from pipeline.contract.errors import PipelineError
from pipeline.contract.run import RunConfig
from pipeline.contract.url_secrets import hide_passwords, passwords_in, without_passwords
from pipeline.limits.store import LimitStore
from pipeline.queue.broker import broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.queue.payloads import open_payloads
from pipeline.redaction import Redactor, redact_logs
from pipeline.settings import Settings, load_settings
from pipeline.store.engine import open_engine, transact
from rollout.app import run_command
from rollout.endpoint import endpoints_of
from workers.llm.lean_client import LeanClient
from workers.process.endpoints import announced_endpoints

PLAIN, ENCODED = "planted-in-plain", "planted/in%codé@d"
WRITTEN = quote(ENCODED, safe="")
FORMS = ("planted", WRITTEN)

SCHEMES = {
    "database.url": ["postgresql"],
    "broker.url": ["redis", "amqp", "sqs"],
    "payloads.url": ["s3", "ftp"],
    "limits.redis_url": ["redis"],
}
#: Lists of URLs, each with the separator of its values.
LISTS = {"llm.base_url": ",", "worker.allowed_base_urls": ",", "broker.url": ";"}


def url_settings() -> dict[str, Any]:
    """Return the type of each setting whose name says that it is a URL."""
    return {
        f"{section}.{name}": field.annotation
        for section, part in Settings.model_fields.items()
        if isinstance(part.annotation, type) and issubclass(part.annotation, BaseModel)
        for name, field in part.annotation.model_fields.items()
        if name.endswith(("url", "urls"))
    }


def planted(name: str) -> Iterator[str]:
    """Yield values of a setting, with passwords in each place of a URL."""
    for scheme in SCHEMES.get(name, ["http"]):
        yield f"{scheme}://user:{PLAIN}@127.0.0.1:1/x"
        yield f"{scheme}://user:{WRITTEN}@127.0.0.1:1/x"
        yield f"{scheme}://user:{PLAIN}/1@127.0.0.1:1/x"
        yield f"{scheme}://127.0.0.1:1/x?password={PLAIN}&api_key={WRITTEN}&sslpassword={PLAIN}"
        yield f"{scheme}://user:{PLAIN}@127.0.0.1:1,127.0.0.1:2/x"
        yield f"{scheme}://user:{PLAIN}@127.0.0.1:1,user:{WRITTEN}@127.0.0.1:2/x"
        if separator := LISTS.get(name):
            one, two = (f"{scheme}://user:{pw}@127.0.0.1:{n + 1}/x" for n, pw in ENDS)
            yield f"{one}{separator}{two}"
            yield f"{one}{separator}user:{WRITTEN}@127.0.0.1:2/x"


ENDS = tuple(enumerate((PLAIN, WRITTEN)))

CASES = [
    pytest.param(name, value, id=f"{name}-{number}")
    for name in url_settings()
    for number, value in enumerate(planted(name))
]


def shown_by(make: Any) -> str:
    """Return what making a thing shows: its repr, or its error with the whole traceback."""
    try:
        made = make()
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return f"{made!r} {made}"


def assert_hidden(shown: str) -> None:
    for form in FORMS:
        assert form not in shown, shown


def settings_with(name: str, value: str, folder: Any, **urls: str) -> Settings:
    section, field = name.split(".")
    others = {each: {"url": url} for each, url in urls.items()}
    overrides = {"data_dir": folder, section: {field: value}, **others}
    return load_settings(overrides=overrides, start=folder)


@pytest.mark.parametrize("name", url_settings())
def test_a_setting_that_is_a_url_is_a_secret(name):
    assert "SecretStr" in repr(url_settings()[name])
    assert "str |" not in repr(url_settings()[name]).replace("SecretStr", "")


@pytest.mark.parametrize(("name", "value"), CASES)
def test_no_object_and_no_error_shows_a_password(tmp_path, name, value):
    settings = settings_with(name, value, tmp_path)
    parts: list[Any] = [lambda: settings, lambda: settings.model_dump_json()]
    if name == "database.url":

        def ask() -> None:
            engine = open_engine(value, connect_timeout_s=2)
            assert_hidden(shown_by(lambda: engine))
            try:
                transact(engine, lambda c: c.execute(text("SELECT 1")))
            finally:
                engine.dispose()

        parts.append(ask)
    if name == "broker.url":

        def connect() -> None:
            broker = broker_of(settings)
            assert_hidden(f"{broker!r} {broker.place}")
            assert_hidden(str(broker.unavailable(OSError(f"cannot reach {value}"))))
            assert_hidden(shown_by(lambda: make_celery_app(broker)))
            if broker.kind != "sqs":
                raise broker.unavailable(OSError(value))

        parts.append(connect)
    if name == "payloads.url":
        parts.append(lambda: open_payloads(settings))
    if name == "limits.redis_url":
        parts.append(lambda: LimitStore.connect(settings.limits_redis_url or ""))
    if name == "llm.base_url":
        parts += [
            lambda: endpoints_of(settings, None),
            lambda: [LeanClient(url) for url in settings.llm.base_urls],
        ]
    if name == "aws.sqs_endpoint_url" and not value.startswith(f"http://user:{PLAIN}/1"):
        parts.append(lambda: broker_of(settings_with(name, value, tmp_path, broker="sqs://")).url)
    parts.append(lambda: announced_endpoints(settings))
    for make in parts:
        assert_hidden(shown_by(make))


def test_a_bucket_that_does_not_answer_is_named_without_the_password(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    url = f"http://user:{PLAIN}@127.0.0.1:1/"
    settings = settings_with("aws.s3_endpoint_url", url, tmp_path, payloads="s3://bucket")
    store = open_payloads(settings)
    shown = shown_by(lambda: store.get("s3://bucket/x"))
    assert "does not answer" in shown
    assert_hidden(shown)


@pytest.mark.parametrize(("name", "value"), CASES)
def test_no_command_shows_a_password(tmp_path, monkeypatch, capsys, name, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", "postgresql://127.0.0.1:1/x")
    monkeypatch.setenv("ROLLOUT_BROKER__URL", "redis://127.0.0.1:1/x")
    monkeypatch.setenv("ROLLOUT_" + name.replace(".", "__").upper(), value)
    for command in (["config", "show", "--origin"], ["status"]):
        run_command(command)
        run_command([*command, "--json"])
    shown = capsys.readouterr()
    assert_hidden(shown.out + shown.err)


@pytest.mark.parametrize("name", ["database.url", "broker.url", "payloads.url", "llm.base_url"])
def test_doctor_shows_no_password(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    for setting in url_settings():
        first = next(iter(planted(setting)))
        monkeypatch.setenv("ROLLOUT_" + setting.replace(".", "__").upper(), first)
    several = list(planted(name))[4]
    monkeypatch.setenv("ROLLOUT_" + name.replace(".", "__").upper(), several)
    run_command(["doctor"])
    run_command(["doctor", "--json"])
    shown = capsys.readouterr()
    assert_hidden(shown.out + shown.err)


@pytest.mark.parametrize(("name", "value"), CASES)
def test_no_log_line_and_no_record_holds_a_password(tmp_path, name, value):
    redactor = Redactor.of(settings_with(name, value, tmp_path), {})
    plain = PLAIN + "/1" * (f"{PLAIN}/1" in value)
    passwords = [plain] * (plain in value) + [WRITTEN, ENCODED] * (WRITTEN in value)
    assert_hidden(redactor.text(f"called {value}; passwords {passwords}"))
    assert_hidden(redactor.data(json.dumps({"x": value}).encode()).decode())
    before = logging.getLogRecordFactory()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("leaky")
    logger.addHandler(handler)
    redact_logs(redactor)
    try:
        logger.error("cannot connect to %s", value)
    finally:
        logger.removeHandler(handler)
        logging.setLogRecordFactory(before)
    assert_hidden(stream.getvalue())


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("database", f"postgresql://u:{PLAIN}@h/x"),
        ("database", {"url": [f"postgresql://u:{PLAIN}@h/x"]}),
        ("broker", {"url": {"amqp": f"amqp://u:{PLAIN}@h/x"}}),
        ("llm", {"base_url": {"x": f"http://u:{PLAIN}@h/x"}}),
    ],
)
def test_a_setting_that_cannot_be_shows_no_password(tmp_path, section, value):
    with pytest.raises(PipelineError) as caught:
        load_settings(overrides={section: value}, start=tmp_path)
    assert_hidden("".join(traceback.format_exception(caught.value)))


@pytest.mark.parametrize("url", [f"http://u:{PLAIN}@h/v1", f"http://h/v1?api_key={PLAIN}"])
def test_no_run_is_stored_with_a_password(tmp_path, capsys, monkeypatch, url):
    with pytest.raises(ValidationError, match="carries no credentials"):
        RunConfig(agent="single_turn", base_url=url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1"}\n')
    assert run_command(["submit", "d.jsonl", "--base-url", url]) == 2
    shown = capsys.readouterr()
    assert_hidden(shown.out + shown.err)
    settings = settings_with("llm.base_url", url, tmp_path)
    assert_hidden(repr(endpoints_of(settings, None)))


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=8)


@given(
    passwords=st.lists(words, min_size=1, max_size=3),
    separator=st.sampled_from([";", ","]),
    in_query=st.booleans(),
)
def test_every_password_of_every_url_is_found_and_hidden(passwords, separator, in_query):
    secrets = [f"~~{each}~~" for each in passwords]
    form = "amqp://h{n}:1/v?password={pw}" if in_query else "amqp://u:{pw}@h{n}:1/v"
    value = separator.join(form.format(n=n, pw=quote(pw, safe="")) for n, pw in enumerate(secrets))
    hidden = hide_passwords(value)
    for number, secret in enumerate(secrets):
        assert quote(secret, safe="") not in hidden
        assert f"h{number}:1" in hidden
        assert {secret, quote(secret, safe="")} <= passwords_in(value)
        assert secret not in without_passwords(f"refused: {secret}", value)
    assert passwords_in(hidden) <= {"***"}


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis+socket:///run/redis.sock?virtual_host=1",
        "amqp://guest@h1//;amqp://guest@h2//",
        "postgresql://u@/db?host=h1:1&host=h2:2&sslkey=/k.pem",
        "http://[::1]:8000/v1,https://other/v1",
        "s3://bucket/prefix",
        "file:///var/lib/payloads",
    ],
)
def test_a_url_without_a_password_is_shown_as_it_is(url):
    assert hide_passwords(url) == url
    assert passwords_in(url) == set()


def test_the_users_and_hosts_stay_visible():
    assert (
        hide_passwords("amqp://u:p1@h1//;amqp://v:p2@h2//") == "amqp://u:***@h1//;amqp://v:***@h2//"
    )
    assert hide_passwords("postgresql://u:p@h1:1,h2:2/d") == "postgresql://u:***@h1:1,h2:2/d"
    assert hide_passwords("postgresql://u@h/d?sslmode=x&password=p") == (
        "postgresql://u@h/d?sslmode=x&password=***"
    )


def test_several_database_hosts_are_read_as_libpq_reads_them():
    engine = open_engine("postgresql://u:p@h1:1,h2:2/d?sslmode=require")
    _, options = engine.dialect.create_connect_args(engine.url)
    named = {name: options[name] for name in ("host", "port", "dbname", "user", "sslmode")}
    assert named == {
        "host": "h1,h2",
        "port": "1,2",
        "dbname": "d",
        "user": "u",
        "sslmode": "require",
    }
