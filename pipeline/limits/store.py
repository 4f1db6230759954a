"""Limits of a whole deployment, kept in Redis: what `rollout limits show|set` reads and writes.

Every process that has a ledger follows a change within about a second. Must not: decide who may
call (`redis_ledger.py` and its scripts do).
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pipeline.contract.errors import ConfigError
from pipeline.limits.ledger import Ask
from pipeline.limits.redis_ledger import RedisLedger, answered
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import ANY_MODEL, LimitStatus, endpoint_key

PREFIX = "rollout:limits"
ANSWER_WITHIN_S = 5.0

#: How Celery writes whether certificates are checked.
_CELERYS_CHECK = re.compile(r"([?&]ssl_cert_reqs=)CERT_(NONE|OPTIONAL|REQUIRED)\b")


class LimitStore:
    """Limits and their counters in one Redis.

    Args:
        client: Must not retry by itself: a script that ran must not run twice.
        prefix: Of every key, so that several deployments can share a server.
    """

    is_shared = True

    def __init__(self, client: Redis, *, prefix: str = PREFIX) -> None:
        self._client = client
        self._prefix = prefix
        self._ledgers: dict[tuple[str, str], RedisLedger] = {}

    @classmethod
    def connect(cls, url: str, *, prefix: str = PREFIX) -> LimitStore:
        """Make a store for a Redis URL; connects on first use.

        Takes `redis://`, `rediss://`, `unix://` and Celery's `redis+socket://`.

        Raises:
            ConfigError: not a Redis URL.
        """
        try:
            client = Redis.from_url(
                _plain_url(url),
                retry=Retry(NoBackoff(), 0),
                socket_timeout=ANSWER_WITHIN_S,
                socket_connect_timeout=ANSWER_WITHIN_S,
            )
        except ValueError as error:
            raise ConfigError(
                "The Redis URL for limits cannot be used.",
                why=str(error),
                remedy="Write it as redis://HOST:PORT/DB, rediss://… or unix:///PATH.",
            ) from error
        return cls(client, prefix=prefix)

    def ledger(self, endpoint: str, model: str) -> RedisLedger:
        """Give the ledger of this endpoint and model; `ANY_MODEL` is the whole endpoint's."""
        key = endpoint_key(endpoint, model)
        if key not in self._ledgers:
            # A call asks two ledgers at once, so all of them have to be on one server.
            prefix = f"{self._prefix}:{{{_digest(key)}}}"
            wide = None if key[1] == ANY_MODEL else self.ledger(endpoint, ANY_MODEL)
            self._ledgers[key] = RedisLedger(self._client, prefix, key, wide=wide)
        return self._ledgers[key]

    async def set(self, endpoint: str, model: str, settings: LimitSettings) -> None:
        """Put limits in force for all workers; takes about a second to reach idle ones.

        Empty settings lift the limits and are remembered as that.
        """
        await self.ledger(endpoint, model).set(settings)

    async def seed(self, endpoint: str, model: str, settings: LimitSettings) -> bool:
        """Put limits in force where none were ever set; say whether it did."""
        return await self.ledger(endpoint, model).restore(settings)

    async def show(self) -> list[LimitStatus]:
        """List the limits and how they are used now."""
        listed = await answered(self._client.hvals(f"{self._prefix}:index"))
        rows: list[LimitStatus] = []
        for endpoint, model in sorted(tuple(json.loads(text)) for text in listed):
            answer = await self.ledger(endpoint, model).sync(Ask(process=""))
            until = datetime.now(UTC) + timedelta(seconds=answer.pause_s)
            rows.append(LimitStatus.of(endpoint, model, answer, until))
        return rows

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _digest(key: tuple[str, str]) -> str:
    return hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]


def _plain_url(url: str) -> str:
    """Write a broker's URL, as Celery takes it, as the Redis client takes it."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis+socket", "redis+unix"):
        return _CELERYS_CHECK.sub(lambda found: found[1] + found[2].lower(), url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0]
    return f"unix://{parts.netloc}{parts.path}?db={database.strip('/') or '0'}"
