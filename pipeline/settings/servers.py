"""The sections of the settings about servers: database, broker, AWS, payload store, limits.

Imported by way of `sections.py`. Must not read files or the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class Section(BaseModel):
    """A frozen part of the settings."""

    # A traceback would show the input, and so the password of a URL.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class DatabaseSettings(Section):
    """The PostgreSQL server of the trajectory store."""

    url: SecretStr | None = Field(
        default=None, description="PostgreSQL URL; None: a private server under the data directory."
    )
    pool_size: int = Field(default=5, ge=1, description="Connections kept open per process.")
    connect_timeout_s: float = Field(default=10, gt=0, description="Longest wait for a connection.")
    network_timeout_s: float = Field(
        default=20,
        ge=2,
        description="Silence of the network after which a connection is given up.",
    )


class BrokerSettings(Section):
    """The broker of requests, completions and heartbeats."""

    url: SecretStr | None = Field(
        default=None,
        description="redis://, amqp:// or sqs:// URL; None: a private Redis under the data "
        "directory.",
    )
    prefix: str = Field(
        default="", description="Put before every queue name; separates deployments."
    )
    signing_key: SecretStr | None = Field(
        default=None,
        description="Shared by all processes, which refuse messages not signed with it; None: "
        "no signatures.",
    )
    tls_ca_file: Path | None = Field(
        default=None,
        description="CA certificates for a broker on TLS (rediss://, amqps://); None: the "
        "system's.",
    )
    tls_cert_file: Path | None = Field(
        default=None, description="Client certificate, where the broker asks for one."
    )
    tls_key_file: Path | None = Field(default=None, description="Key of the client certificate.")
    connect_timeout_s: float = Field(default=5, gt=0, description="Longest wait for a connection.")
    network_timeout_s: float = Field(
        default=20,
        ge=2,
        description="Silence of the network after which a connection is given up.",
    )

    def tls_files(self, *, ca: str, cert: str, key: str) -> dict[str, str]:
        """Return the paths that are set, under the names that a client uses."""
        files = {ca: self.tls_ca_file, cert: self.tls_cert_file, key: self.tls_key_file}
        return {name: str(path) for name, path in files.items() if path is not None}


class AwsSettings(Section):
    """Endpoints of SQS and S3; credentials come from the usual AWS places."""

    region: str = Field(default="us-east-1", description="AWS region.")
    endpoint_url: SecretStr | None = Field(
        default=None, description="Endpoint of all AWS services."
    )
    sqs_endpoint_url: SecretStr | None = Field(default=None, description="Endpoint of SQS alone.")
    s3_endpoint_url: SecretStr | None = Field(default=None, description="Endpoint of S3 alone.")

    @property
    def sqs_endpoint(self) -> str | None:
        """The URL of SQS; None: that of AWS."""
        return revealed(self.sqs_endpoint_url or self.endpoint_url)

    @property
    def s3_endpoint(self) -> str | None:
        """The URL of S3; None: that of AWS."""
        return revealed(self.s3_endpoint_url or self.endpoint_url)


class PayloadSettings(Section):
    """The transport of trajectories from worker to collector."""

    mode: Literal["inline", "object"] = Field(
        default="inline",
        description="`object`: always through the object store, before the message.",
    )
    url: SecretStr | None = Field(
        default=None,
        description="file:///… or s3://bucket/prefix; None: a folder of the data directory.",
    )
    inline_max_bytes: int = Field(
        default=256 * 1024, ge=0, description="Larger bodies go to the object store."
    )
    connect_timeout_s: float = Field(
        default=5, gt=0, description="Longest wait for a connection to S3."
    )
    network_timeout_s: float = Field(
        default=20, gt=0, description="Longest wait for data of S3; each call is tried three times."
    )


class LimitsRedisSettings(Section):
    """The Redis that holds limits on model calls; `rollout limits set` sets them."""

    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis that all workers reach; None: the broker where that is Redis, else "
        "calls are unlimited and only pause after 429s.",
    )


def revealed(url: SecretStr | None) -> str | None:
    """Return a secret URL as text."""
    return url.get_secret_value() if url else None
