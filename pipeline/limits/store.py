"""The limits of a deployment in Redis: `rollout limits show|set` reads and writes them here.

Every worker that uses limits follows a change within about a second. Must not decide which call may
start: `grant.lua` does.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pipeline.contract.errors import ConfigError
from pipeline.contract.url_secrets import hide_passwords
from pipeline.limits.settings import LimitSettings
from pipeline.limits.shared_limits import SharedLimits, answered
from pipeline.limits.status import ANY_MODEL, LimitStatus, endpoint_key
from pipeline.limits.sync_messages import SyncRequest

PREFIX = "rollout:limits"
TIMEOUT_S = 5.0

#: Celery's spelling of whether certificates are checked.
_CELERY_CERT_REQS = re.compile(r"([?&]ssl_cert_reqs=)CERT_(NONE|OPTIONAL|REQUIRED)\b")


class LimitStore:
    """Limits and their counters in one Redis.

    Args:
        client: Must not retry by itself: a script that ran must not run twice.
        prefix: Of every key, so that several deployments can share a server.
    """

    def __init__(self, client: Redis, *, prefix: str = PREFIX) -> None:
        self._client = client
        self._prefix = prefix
        self._limits: dict[tuple[str, str], SharedLimits] = {}

    @classmethod
    def connect(cls, url: str, *, prefix: str = PREFIX) -> LimitStore:
        """Make a store for a Redis URL; connects on first use.

        Takes `redis://`, `rediss://`, `unix://` and Celery's `redis+socket://`.

        Raises:
            ConfigError: Not a Redis URL.
        """
        try:
            client = Redis.from_url(
                _plain_url(url),
                retry=Retry(NoBackoff(), 0),
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
            )
        except ValueError:  # its text may show a part of the password
            raise ConfigError(
                f"The Redis URL for limits, {hide_passwords(url)}, cannot be used.",
                remedy="Write it as redis://HOST:PORT/DB, rediss://… or unix:///PATH, and "
                "percent-encode its password.",
            ) from None
        return cls(client, prefix=prefix)

    def limits_of(self, endpoint: str, model: str) -> SharedLimits:
        """Return the limits of an endpoint and model; `ANY_MODEL` is the whole endpoint."""
        key = endpoint_key(endpoint, model)
        if key not in self._limits:
            # One script call reads both, so both have to be on one server.
            whole = None if key[1] == ANY_MODEL else self.limits_of(endpoint, ANY_MODEL)
            self._limits[key] = SharedLimits(self._client, self._prefix, *key, of_endpoint=whole)
        return self._limits[key]

    async def set(self, endpoint: str, model: str, settings: LimitSettings) -> None:
        """Put limits in force for all workers; idle ones follow within about a second.

        Empty settings lift the limits; a later call does not restore earlier ones.
        """
        await self.limits_of(endpoint, model).set(settings)

    async def show(self) -> list[LimitStatus]:
        """List the limits and how they are used now."""
        listed = await answered(self._client.hvals(f"{self._prefix}:index"))
        return [await self._status(*key) for key in sorted(map(json.loads, listed))]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _status(self, endpoint: str, model: str) -> LimitStatus:
        reply = await self.limits_of(endpoint, model).sync(SyncRequest(process=""))
        pause_until = datetime.now(UTC) + timedelta(seconds=reply.pause_s)
        return LimitStatus(
            endpoint=endpoint,
            model=model,
            settings=reply.settings,
            granted=reply.granted,
            waiting=reply.waiting,
            in_flight=reply.in_flight,
            backing_off_until=pause_until if reply.pause_s > 0 else None,
            cap=reply.cap or None,
            unused_s=reply.unused_s,
        )


def _plain_url(url: str) -> str:
    """Convert a broker's URL from Celery's form to that of the Redis client."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis+socket", "redis+unix"):
        return _CELERY_CERT_REQS.sub(lambda found: found[1] + found[2].lower(), url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0]
    return f"unix://{parts.netloc}{parts.path}?db={database.strip('/') or '0'}"
