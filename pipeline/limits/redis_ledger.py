"""The ledger that all processes share: one Lua script in Redis, one call per ask.

`LimitStore.ledger` makes them, `Limiter` asks them. The script uses the server's clock. A lost
connection is an error here, never a grant: the limiter waits and asks again. Must not retry a
call by itself, because the script may have run.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from importlib.resources import files
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from pipeline.limits.ledger import Answer, Ask, Grant, LedgerUnavailable, Reason
from pipeline.limits.settings import HORIZON_S, LimitSettings

_KEYS = ("state", "limits", "flows", "idle", "due", "waits", "runs", "leases", "held", "free")
SCRIPT_PARTS = ("state", "token_bucket", "concurrency", "fair_share", "book", "grant")

_T = TypeVar("_T")


async def answered(reply: Awaitable[_T] | _T) -> _T:
    """Await a reply of Redis.

    Raises:
        LedgerUnavailable: Redis does not answer, or answers with an error.
    """
    try:
        return await cast("Awaitable[_T]", reply)
    # OSError: a TLS or name lookup failure is not always wrapped.
    except (RedisError, OSError) as error:
        raise LedgerUnavailable(
            "The limits in Redis cannot be read or written.",
            why=f"{type(error).__name__}: {error}",
            remedy="Check that Redis runs, and ROLLOUT_LIMITS__REDIS_URL or ROLLOUT_BROKER__URL.",
        ) from error


def lua_source(*parts: str) -> str:
    """Join Lua files of this package into one chunk."""
    folder = files("pipeline.limits")
    return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)


class Script:
    """A Lua script, called by its digest and loaded again where the server has forgotten it."""

    def __init__(self, client: Redis, source: str) -> None:
        self.calls = 0
        self._client = client
        self._source = source
        self._digest = ""

    async def run(self, keys: list[str], *args: str) -> Any:
        """Run the script.

        Raises:
            LedgerUnavailable: Redis does not answer, or answers with an error.
        """
        if not self._digest:
            self._digest = await answered(self._client.script_load(self._source))
        self.calls += 1
        return await answered(self._call(keys, args))

    async def _call(self, keys: list[str], args: tuple[str, ...]) -> Any:
        try:
            return await self._client.evalsha(self._digest, len(keys), *keys, *args)
        except NoScriptError:
            # A restarted or flushed server; nothing has run, so asking again is safe.
            self.calls += 1
            return await self._client.eval(self._source, len(keys), *keys, *args)


class RedisLedger:
    """The limits of one endpoint and model, kept in Redis.

    Args:
        client: Must not retry by itself.
        prefix: Of every key that belongs to `name`.
        name: Endpoint and model.
        wide: The ledger of the whole endpoint; its limits hold too, in the same call.
        source: Another script, for tests.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        name: tuple[str, str],
        *,
        wide: RedisLedger | None = None,
        source: str = "",
    ) -> None:
        base, _, digest = prefix.rpartition(":")
        self._index, self._field, self._name = f"{base}:index", digest, json.dumps(name)
        self._model = name[1].replace("\n", " ")
        self._wide = wide
        self._is_listed = False
        self._client = client
        self._keys = [f"{prefix}:{name}" for name in _KEYS]
        self._grant = Script(client, source or lua_source(*SCRIPT_PARTS))
        self._limits = Script(client, lua_source("limits"))

    @property
    def calls(self) -> int:
        """Script calls made so far by this process."""
        return self._grant.calls

    async def sync(self, ask: Ask) -> Answer:
        """Report and ask in one script call."""
        if ask.process:
            await self._list()
        keys = self._keys + (self._wide._keys if self._wide else [])
        text = await self._grant.run(keys, encode(ask), str(HORIZON_S), self._model)
        answer = decode(text)
        # A first call, or the first since Redis lost its memory: then the index is lost too.
        self._is_listed = self._is_listed and answer.calls > 1
        return answer

    async def set(self, settings: LimitSettings) -> None:
        """Put limits in force for everybody."""
        await self._write("set", settings)

    async def restore(self, settings: LimitSettings) -> bool:
        """Put limits in force where Redis knows of none; say whether it did."""
        return await self._write("seed", settings)

    async def restore_wide(self, settings: LimitSettings) -> bool:
        """Put limits of the whole endpoint in force where Redis knows of none."""
        return self._wide is not None and await self._wide.restore(settings)

    async def _write(self, mode: str, settings: LimitSettings) -> bool:
        await self._list()
        state, limits, free = self._keys[0], self._keys[1], self._keys[-1]
        fields = limit_fields(settings)
        return bool(await self._limits.run([state, limits, free], mode, *fields))

    async def _list(self) -> None:
        """Enter this ledger in the index that `LimitStore.show` reads."""
        if not self._is_listed:
            await answered(self._client.hset(self._index, self._field, self._name))
            self._is_listed = True


def encode(ask: Ask) -> str:
    """Write an ask as the script reads it."""
    body: dict[str, Any] = {
        "process": ask.process,
        "lease": ask.lease_s,
        "version": ask.version,
        "wide_version": ask.wide_version,
        "held": ask.held,
        "demands": [[d.run, d.weight, d.waiting, d.estimates] for d in ask.demands],
        "returned": [[r.at, r.tokens] for r in ask.returned],
        "owed": ask.tokens_owed,
        "ok": ask.outcomes.ok,
        "congested": ask.outcomes.congested,
        "latency_sum": ask.outcomes.latency_sum_s,
    }
    if ask.backoff_s is not None:
        body["backoff"] = ask.backoff_s
    return json.dumps(body)


def decode(text: bytes | str) -> Answer:
    """Read the script's answer."""
    body = json.loads(text)
    settings, wide = body.get("settings"), body.get("wide_settings")
    return Answer(
        now=float(body["now"]),
        version=int(body["version"]),
        settings=LimitSettings.model_validate_json(settings) if settings else None,
        wide_version=int(body["wide_version"]),
        wide_settings=LimitSettings.model_validate_json(wide) if wide else None,
        is_wide=body["is_wide"],
        # Lua has one type for lists and objects: an empty list arrives as {}.
        grants=[Grant(int(i), float(delay), int(t)) for i, delay, t in body["grants"] or ()],
        retry_in_s=body["retry_in"],
        reason=Reason(body["reason"]),
        pause_s=body["pause"],
        waiting=int(body["waiting"]),
        in_flight=int(body["in_flight"]),
        cap=int(body["cap"]),
        is_contended=body["contended"],
        granted=int(body["granted"]),
        calls=int(body["calls"]),
        unused_s=body.get("unused"),
    )


def limit_fields(settings: LimitSettings) -> list[str]:
    """Write limits as the fields of their hash, in turn: name, value."""
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
