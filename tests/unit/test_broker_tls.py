"""TLS towards the broker: certificates are checked, with our own authority if one is named."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.settings import load_settings
from pipeline.store.engine import open_engine


def broker_at(url: str, tmp_path: Path, **more: Any) -> Broker:
    return broker_of(load_settings(overrides={"broker": {"url": url, **more}}, start=tmp_path))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {f"tls_{name}_file": tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}


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


def test_shared_limits_trust_the_same_authority(tmp_path, files):
    settings = load_settings(
        overrides={"broker": {"url": "rediss://h/0", "tls_ca_file": files["tls_ca_file"]}},
        start=tmp_path,
    )
    assert settings.limits_redis_url == f"rediss://h/0?ssl_ca_certs={files['tls_ca_file']}"


def test_postgres_takes_its_tls_options_from_the_url(tmp_path):
    engine = open_engine("postgresql://u@h/n?sslmode=verify-full&sslrootcert=/ca.pem")
    _, options = engine.dialect.create_connect_args(engine.url)
    assert (options["sslmode"], options["sslrootcert"]) == ("verify-full", "/ca.pem")
    assert isinstance(engine, sa.Engine)


def test_no_broker_shows_its_secrets(tmp_path):
    broker = broker_at("amqp://user:planted-pw@h//", tmp_path, signing_key="planted-key")
    for text in (repr(broker), str(broker), broker.place, str(broker.unavailable(OSError("no")))):
        assert "planted" not in text


# A server with a certificate of its own authority


def _certificate(tmp_path: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker of a test")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "server.pem", tmp_path / "server.key"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


class TlsServer:
    """Shakes hands and says nothing more; notes what clients sent first."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate = certificate
        self.heard: list[bytes] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            try:
                with self._context.wrap_socket(plain, server_side=True) as secured:
                    secured.settimeout(2)
                    self.heard.append(secured.recv(100))
            except OSError:
                plain.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[TlsServer]:
    server = TlsServer(*_certificate(tmp_path))
    yield server
    server.close()


@pytest.mark.parametrize("scheme", ["rediss", "amqps"])
def test_an_unknown_authority_is_refused_and_a_named_one_is_trusted(tmp_path, tls_server, scheme):
    url = f"{scheme}://user:planted-pw@127.0.0.1:{tls_server.port}//"

    def greet(**more: Any) -> None:
        with broker_at(url, tmp_path, connect_timeout_s=2, **more).connect() as connection:
            connection.ensure_connection(max_retries=1, timeout=3)
            connection.default_channel.queue_declare("q", passive=False)

    with pytest.raises(Exception, match=r"(?i)certificate|ssl"):
        greet()
    assert b"planted" not in b"".join(tls_server.heard)
    assert not any(tls_server.heard), "nothing was said to a stranger"
    with pytest.raises(Exception, match=r"."):
        greet(tls_ca_file=tls_server.certificate)
    assert any(tls_server.heard), "the handshake was made"
