"""TLS towards the broker: which settings become which options of which connection."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import sqlalchemy as sa

from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.settings import load_settings
from pipeline.store.engine import open_engine


def broker_at(url: str, tmp_path: Path, **more: Any) -> Broker:
    return broker_of(load_settings(overrides={"broker": {"url": url, **more}}, start=tmp_path))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {f"tls_{name}_file": tmp_path / f"of us & {name}.pem" for name in ("ca", "cert", "key")}


@pytest.mark.parametrize("url", ["redis://h/0", "redis+socket:///s", "amqp://h//", "sqs://a:b@"])
def test_without_tls_in_the_url_there_is_none(tmp_path, url, files):
    assert broker_at(url, tmp_path, **files).tls is None


def test_redis_over_tls_checks_the_certificate(tmp_path, files):
    assert broker_at("rediss://h/0", tmp_path).tls == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    broker = broker_at("rediss://h/0", tmp_path, **files)
    assert broker.tls == {
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
        "ssl_ca_certs": str(files["tls_ca_file"]),
        "ssl_certfile": str(files["tls_cert_file"]),
        "ssl_keyfile": str(files["tls_key_file"]),
    }
    assert broker.connect().ssl == broker.tls
    assert make_celery_app(broker).connection_for_write().ssl == broker.tls


def test_what_the_url_says_of_tls_is_left_to_it(tmp_path, files):
    broker = broker_at("rediss://h/0?ssl_cert_reqs=optional", tmp_path, **files)
    assert broker.connect().ssl == {"ssl_cert_reqs": ssl.CERT_OPTIONAL}


def test_rabbitmq_over_tls_checks_certificate_and_name(tmp_path, files):
    broker = broker_at("amqps://u:p@h//", tmp_path, tls_ca_file=files["tls_ca_file"])
    assert broker.tls == {
        "cert_reqs": ssl.CERT_REQUIRED,
        "server_hostname": "h",
        "ca_certs": str(files["tls_ca_file"]),
    }
    assert make_celery_app(broker).connection_for_write().ssl == broker.tls


@pytest.mark.parametrize("limits", [{}, {"redis_url": "rediss://other/1"}])
def test_shared_limits_use_the_same_certificates(tmp_path, files, limits):
    settings = load_settings(
        overrides={"broker": {"url": "rediss://h/0", **files}, "limits": limits}, start=tmp_path
    )
    assert settings.limits_redis_url is not None
    url, _, query = settings.limits_redis_url.partition("?")
    assert url == (limits.get("redis_url") or "rediss://h/0")
    assert parse_qs(query) == {
        "ssl_ca_certs": [str(files["tls_ca_file"])],
        "ssl_certfile": [str(files["tls_cert_file"])],
        "ssl_keyfile": [str(files["tls_key_file"])],
    }


def test_postgres_takes_its_tls_options_from_the_url(tmp_path):
    engine = open_engine("postgresql://u@h/n?sslmode=verify-full&sslrootcert=/ca.pem")
    _, options = engine.dialect.create_connect_args(engine.url)
    assert (options["sslmode"], options["sslrootcert"]) == ("verify-full", "/ca.pem")
    assert isinstance(engine, sa.Engine)


def test_no_broker_shows_its_secrets(tmp_path):
    broker = broker_at("amqp://user:planted-pw@h//", tmp_path, signing_key="planted-key")
    for text in (repr(broker), str(broker), broker.place, str(broker.unavailable(OSError("no")))):
        assert "planted" not in text
