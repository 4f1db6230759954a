"""The limits of one endpoint and model in Redis; each sync is one call of one Lua script.

`LimitStore` makes them, `Limiter` syncs them. The script uses the server's clock. A lost connection
is an error here, never a grant: the limiter waits and syncs again. Must not retry a call by itself,
because the script may have run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable
from importlib.resources import files
from typing import TypeVar, cast

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline.contract.errors import ServiceUnavailable
from pipeline.limits.settings import HORIZON_S, LimitSettings
from pipeline.limits.sync_messages import Grant, SyncReply, SyncRequest, WaitReason

_KEYS = ("state", "limits", "flows", "idle", "due", "waits", "runs", "leases", "held", "free")
_SCRIPT_PARTS = ("state", "token_bucket", "concurrency", "fair_share", "scope", "grant")

_T = TypeVar("_T")


class LimitsUnavailable(ServiceUnavailable):
    """Redis does not answer; calls wait until it does."""

    code = "E205"


async def answered(reply: Awaitable[_T] | _T) -> _T:
    """Await a reply of Redis.

    Raises:
        LimitsUnavailable: Redis does not answer, or answers with an error.
    """
    try:
        return await cast("Awaitable[_T]", reply)
    # OSError: a TLS or name lookup failure is not always wrapped.
    except (RedisError, OSError) as error:
        raise LimitsUnavailable(
            "The limits in Redis cannot be read or written.",
            why=f"{type(error).__name__}: {error}",
            remedy="Check that Redis runs, and ROLLOUT_LIMITS__REDIS_URL or ROLLOUT_BROKER__URL.",
        ) from error


def lua_source(*parts: str) -> str:
    """Join Lua files of this package into one script; without arguments, those of a sync."""
    folder = files("pipeline.limits")
    names = parts or _SCRIPT_PARTS
    return "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in names)


class SharedLimits:
    """Limits, waiting callers and calls in flight of one endpoint and model.

    Args:
        client: Must not retry by itself.
        prefix: Of every key.
        of_endpoint: The limits of the whole endpoint; the same script call checks them.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        endpoint: str,
        model: str,
        *,
        of_endpoint: SharedLimits | None = None,
    ) -> None:
        digest = hashlib.sha256(f"{endpoint}\n{model}".encode()).hexdigest()[:16]
        self._index, self._field = f"{prefix}:index", f"{{{digest}}}"
        self._name = json.dumps((endpoint, model))
        self._is_listed = False
        self._model = model.replace("\n", " ")
        self._client = client
        self._keys = [f"{prefix}:{self._field}:{key}" for key in _KEYS]
        self._grant_script = client.register_script(lua_source())
        self._limits_script = client.register_script(lua_source("limits"))
        self.of_endpoint = of_endpoint
        self.calls = 0  #: of the script, by this process

    async def sync(self, request: SyncRequest) -> SyncReply:
        """Report and ask in one script call.

        Raises:
            LimitsUnavailable: Redis does not answer; the script may or may not have run.
        """
        if request.process:
            await self._list()
        self.calls += 1
        keys = self._keys + (self.of_endpoint._keys if self.of_endpoint else [])
        args = orjson.dumps(request), str(HORIZON_S), self._model
        reply = _decode(await answered(self._grant_script(keys, args)))
        # A first call, or the first since Redis lost its memory: then the index is lost too.
        self._is_listed = self._is_listed and reply.calls > 1
        return reply

    async def set(self, settings: LimitSettings) -> None:
        """Put limits in force for all processes."""
        await self._write("set", settings)

    async def restore(self, settings: LimitSettings) -> None:
        """Put limits in force where Redis knows of none."""
        await self._write("seed", settings)

    async def _write(self, mode: str, settings: LimitSettings) -> None:
        await self._list()
        keys = [self._keys[_KEYS.index(key)] for key in ("state", "limits", "free")]
        await answered(self._limits_script(keys, (mode, *_limit_fields(settings))))

    async def _list(self) -> None:
        """Enter these limits in the index that `LimitStore.show` reads."""
        if not self._is_listed:
            await answered(self._client.hset(self._index, self._field, self._name))
            self._is_listed = True


def _decode(text: bytes) -> SyncReply:
    body = orjson.loads(text)
    body["now"] = float(body["now"])  # text, because cjson keeps 14 digits only
    # Lua has one type for lists and objects: an empty list arrives as {}.
    body["grants"] = [Grant(*grant) for grant in body["grants"]]
    body["reason"] = WaitReason(body["reason"])
    for name in ("settings", "endpoint_settings"):
        text_of = body.get(name)  # 0 where limits were never set
        body[name] = LimitSettings.model_validate_json(text_of) if text_of else None
    return SyncReply(**body)


def _limit_fields(settings: LimitSettings) -> list[str]:
    """Return limits as the fields of their hash: name, value, name, value, ..."""
    pace = settings.pace()
    numbers = {
        "request_interval": pace.request_interval_s,
        "request_tolerance": pace.request_tolerance_s,
        "token_interval": pace.token_interval_s,
        "token_tolerance": pace.token_tolerance_s,
        "max_concurrency": pace.max_concurrency,
        "adaptive": int(pace.adaptive),
        "horizon": pace.horizon_s,
    }
    fields = ["settings", settings.model_dump_json(exclude_none=True)]
    for name, number in numbers.items():
        fields += [name, repr(number)]
    return fields
