"""The address of the broker, and the differences between Redis, RabbitMQ and SQS.

Used by all code that connects: the Celery application, publishers, consumers, `rollout doctor`.
The rest of the code does not know which broker is used.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from kombu import Connection, Exchange, Queue
from kombu.transport import TRANSPORT_ALIASES

from pipeline.contract.errors import ConfigError, QueueUnavailable
from pipeline.contract.url_secrets import hide_passwords, without_passwords
from pipeline.queue.driver_errors import is_driver_error
from pipeline.queue.signing import Signer
from pipeline.settings import BrokerSettings, Settings
from pipeline.settings.keepalive import Keepalive

BrokerKind = Literal["redis", "amqp", "sqs"]

#: Seconds after which Redis and SQS deliver an unacknowledged message again. Requests are
#: acknowledged when they start and completions when they are committed, both within moments: a
#: message that stays unacknowledged belonged to a process that died.
_VISIBILITY_S = 60

#: Largest messages of RabbitMQ 4 (its default) and of SQS, and the part kept free for headers.
_AMQP_BYTES = 16 * 2**20
_SQS_BYTES = 2**20
_ENVELOPE_BYTES = 8 * 2**10

#: Kombu and Flower find a transport by the scheme of the URL.
TRANSPORT_ALIASES.update(
    {
        "redis": "pipeline.queue.redis_transport:Transport",
        "rediss": "pipeline.queue.redis_transport:Transport",
        "sqs": "pipeline.queue.sqs_transport:Transport",
    }
)


@dataclass(frozen=True)
class Broker:
    """The address of a broker, and its differences from other kinds.

    Args:
        url: Address with credentials; never log it, log `place`.
        kind: Kind of the broker.
        transport_options: Options of kombu's transport, also used by Celery.
        queue_arguments: Arguments of every queue that is declared.
        prefix: Prefix of queue names, where the transport has no such option.
        signing_key: Signs messages that are sent, checks those received; None: neither.
        tls: Kombu's `ssl` argument; None where the URL holds all TLS options.
        most_bytes: Longest JSON text or frame that fits into a message; None: no practical limit.
    """

    url: str = field(repr=False)
    kind: BrokerKind
    transport_options: dict[str, Any]
    queue_arguments: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    connect_timeout_s: float = 5
    network_timeout_s: float = 20
    signing_key: bytes | None = field(default=None, repr=False)
    tls: dict[str, Any] | None = None
    most_bytes: int | None = None

    @property
    def signer(self) -> Signer:
        """Signs and checks the messages of this deployment."""
        return Signer(self.signing_key)

    @property
    def place(self) -> str:
        """The address without its passwords, for logs and messages."""
        return hide_passwords(self.url)

    def inline_bytes(self, most: int) -> int:
        """Return the size up to which a body travels inside a request: `most`, and 0 on SQS.

        Larger bodies go through the payload store, because brokers are made for small messages.
        """
        return 0 if self.kind == "sqs" else most

    @property
    def has_remote_control(self) -> bool:
        """Whether workers receive broadcast commands; SQS has no fanout."""
        return self.kind != "sqs"

    @property
    def keeps_order(self) -> bool:
        """Whether requests are delivered in the order in which they were published."""
        return self.kind != "sqs"

    @property
    def hides_s(self) -> float:
        """Seconds for which SQS hides a dead consumer's messages; 0 where order is kept."""
        return 0.0 if self.keeps_order else float(self.transport_options["visibility_timeout"])

    @property
    def counts_exactly(self) -> bool:
        """Whether `depth` is exact; SQS returns an estimate."""
        return self.kind != "sqs"

    def queue(self, name: str) -> Queue:
        """Return a durable queue of this deployment."""
        full = self.prefix + name
        return Queue(
            full,
            Exchange(""),
            routing_key=full,
            durable=True,
            queue_arguments=dict(self.queue_arguments),
        )

    def connect(
        self, *, confirm: bool = False, unacked_key: str | None = None, heartbeats: bool = False
    ) -> Connection:
        """Return a connection that is made when first used.

        Args:
            confirm: RabbitMQ: publishing waits for the publisher confirm. Completions use this.
                Requests do not: a lost request is found by its lease, and a confirm costs
                milliseconds.
            heartbeats: RabbitMQ: both sides send heartbeats; the caller calls `heartbeat_check`
                at least every second. Consumers use this: RabbitMQ keeps the messages of a
                consumer that vanished until it misses heartbeats. Publishers hold no messages, and
                an idle publisher would not send its heartbeats.
            unacked_key: Redis: key that holds the messages read and not yet acknowledged.
        """
        options = dict(self.transport_options)
        if confirm and self.kind == "amqp":
            options["confirm_publish"] = True
        if unacked_key and self.kind == "redis":
            options["unacked_key"] = unacked_key
            options["unacked_index_key"] = f"{unacked_key}.index"
            options["unacked_mutex_key"] = f"{unacked_key}.mutex"
            # Messages have no priorities; each step costs a request where a queue is asked.
            options["priority_steps"] = [0]
        return Connection(
            self.url,
            transport_options=options,
            ssl=self.tls,  # pyright: ignore[reportArgumentType]
            connect_timeout=self.connect_timeout_s,  # pyright: ignore[reportArgumentType]
            heartbeat=max(1, int(self.network_timeout_s / 2)) if heartbeats else 0,
        )

    def depth(self, connection: Connection, name: str, *, with_received: bool = False) -> int:
        """Return the number of messages in a queue, without those that consumers hold unacked.

        Args:
            connection: A connection to this broker.
            name: The queue, without the prefix.
            with_received: SQS: count those as well. A message that a dead worker had received
                stays hidden for the visibility timeout, then it is delivered again.

        Raises:
            QueueUnavailable: The broker does not answer.
        """
        with self.driver_errors():
            channel: Any = connection.default_channel
            # Declaring is idempotent on every broker, and returns the count.
            queue = self.queue(name)
            declared = queue.bind(channel).queue_declare()
            if with_received and self.kind == "sqs":
                return channel.count_unfinished(queue.name)
            return int(declared.message_count)

    @contextmanager
    def driver_errors(self, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Turn every error of a driver into `QueueUnavailable`; the only place that does.

        Args:
            clean_up: Called before a driver's error is raised again, to drop the connection.

        Raises:
            QueueUnavailable: The broker did not answer, or refused.
        """
        try:
            yield
        except Exception as error:
            if not is_driver_error(error):
                raise
            clean_up()
            raise self.unavailable(error) from error

    def unavailable(self, error: BaseException) -> QueueUnavailable:
        """Return the error for a broker that cannot be reached."""
        return QueueUnavailable(
            f"The broker at {self.place} does not answer.",
            why=without_passwords(str(error).strip(), self.url) or type(error).__name__,
            remedy="Check ROLLOUT_BROKER__URL, or start local services: rollout up",
        )


def broker_of(settings: Settings) -> Broker:
    """Return the broker the settings name.

    Raises:
        ConfigError: The URL is missing, or names a broker that is not supported.
    """
    broker = settings.broker
    if broker.url is None:
        raise ConfigError(
            "No broker is set.",
            remedy="Start local services (rollout up), or set "
            "ROLLOUT_BROKER__URL to a redis://, amqp:// or sqs:// URL.",
        )
    url = broker.url.get_secret_value()
    scheme = url.partition(":")[0].lower()
    _require_readable(url)
    tcp_options = Keepalive(broker.network_timeout_s).socket_options()
    make = partial(
        Broker,
        connect_timeout_s=broker.connect_timeout_s,
        network_timeout_s=broker.network_timeout_s,
        signing_key=broker.signing_key.get_secret_value().encode() if broker.signing_key else None,
    )
    if scheme in ("redis", "rediss", "redis+socket", "unix"):
        options = _redis_options(broker)
        if scheme in ("redis", "rediss"):
            options |= {"socket_keepalive": True, "socket_keepalive_options": tcp_options}
        tls = _redis_tls(url, broker) if scheme == "rediss" else None
        return make(url, "redis", options, tls=tls)
    if scheme in ("amqp", "amqps", "pyamqp"):
        return make(
            url,
            "amqp",
            {"socket_settings": tcp_options, "write_timeout": broker.network_timeout_s},
            # Quorum queues keep their messages when a node is lost, and RabbitMQ recommends them.
            queue_arguments={"x-queue-type": "quorum"},
            prefix=broker.prefix,
            tls=_amqp_tls(url, broker) if scheme == "amqps" else None,
            most_bytes=_AMQP_BYTES - _ENVELOPE_BYTES,
        )
    if scheme == "sqs":
        url, options = _sqs_options(url, settings)
        # Base64 encodes the body, and then the message around the body.
        return make(url, "sqs", options, most_bytes=(_SQS_BYTES - _ENVELOPE_BYTES) * 9 // 16)
    raise ConfigError(
        f"The broker URL begins with {scheme}://.",
        remedy="Supported: redis://, rediss://, redis+socket://, amqp://, amqps://, sqs://.",
    )


def _require_readable(url: str) -> None:
    try:
        for each in url.split(";"):
            _ = urlsplit(each).port
    except ValueError:  # its text would show a part of the password
        raise ConfigError(
            f"The broker URL {hide_passwords(url)} cannot be read.",
            why="Its port is no number, or its password holds a character that URLs reserve.",
            remedy="Percent-encode the password: %2F for /, %3F for ?, %23 for #, %40 for @.",
        ) from None


def _redis_options(settings: BrokerSettings) -> dict[str, Any]:
    return {
        "visibility_timeout": _VISIBILITY_S,
        "unacked_restore_limit": 1000,
        "global_keyprefix": settings.prefix,
        "socket_connect_timeout": settings.connect_timeout_s,
        # Kombu reads a blocking pop when data is there, so its wait is not cut short.
        "socket_timeout": settings.network_timeout_s,
        "health_check_interval": max(1, int(settings.network_timeout_s / 2)),
        "max_connections": 100,
    }


def _redis_tls(url: str, settings: BrokerSettings) -> dict[str, Any] | None:
    if "ssl_" in urlsplit(url).query:
        return None
    # Without `ssl_cert_reqs` kombu checks no certificate at all.
    files = settings.tls_files(ca="ssl_ca_certs", cert="ssl_certfile", key="ssl_keyfile")
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED} | files


def _amqp_tls(url: str, settings: BrokerSettings) -> dict[str, Any]:
    options = {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": urlsplit(url).hostname}
    return options | settings.tls_files(ca="ca_certs", cert="certfile", key="keyfile")


def _sqs_options(url: str, settings: Settings) -> tuple[str, dict[str, Any]]:
    """Return the URL and the transport options for SQS."""
    aws = settings.aws
    options: dict[str, Any] = {
        "region": aws.region,
        "visibility_timeout": _VISIBILITY_S,
        "wait_time_seconds": 1,
        "polling_interval": 0.1,
        "queue_name_prefix": settings.broker.prefix,
        "client-config": {
            "connect_timeout": settings.broker.connect_timeout_s,
            "read_timeout": settings.broker.network_timeout_s,
            "retries": {"total_max_attempts": 3},
            "tcp_keepalive": True,
        },
    }
    if endpoint := aws.sqs_endpoint:
        # Kombu has no option for the endpoint: the host of the broker URL is the endpoint.
        parts, server = urlsplit(url), urlsplit(endpoint)
        credentials, at, _ = parts.netloc.rpartition("@")
        host = server.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=credentials + at + host))
        options["is_secure"] = server.scheme == "https"
    return url, options
