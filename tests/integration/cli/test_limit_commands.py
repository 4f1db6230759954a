"""`rollout limits`: set from outside, in force for callers that are already there."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.limits.pool import LimiterPool
from pipeline.settings import Settings, load_settings
from rollout.app import run_command

ENDPOINT, MODEL = "https://models.example/v1", "small"
Cli = Callable[..., Any]


@pytest.fixture
def cli(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Any) -> Cli:
    """Call the command line on a Redis, in a deployment of this test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_BROKER__URL", redis_url)
    monkeypatch.setenv("ROLLOUT_BROKER__PREFIX", f"t{uuid.uuid4().hex[:8]}-")

    def call(*arguments: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run_command(["limits", *arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return call


def pool_of(settings: Settings) -> LimiterPool:
    assert settings.limits_redis_url is not None
    return LimiterPool(settings.limits_redis_url, prefix=settings.limits_prefix)


def at(url: str = ENDPOINT) -> tuple[str, ...]:
    return ("--base-url", url, "--model", MODEL)


def test_limits_that_are_set_are_shown(cli):
    assert cli("show") == []
    cli("set", *at(), "--requests-per-minute", "600", "--tokens-per-minute", "9000")
    (row,) = cli("show")
    assert (row["endpoint"], row["model"]) == (ENDPOINT, MODEL)
    assert row["limits"] == {"requests_per_minute": 600, "tokens_per_minute": 9000}
    cli("set", *at(ENDPOINT + "/"), "--max-concurrency", "3")
    (row,) = cli("show")
    assert row["limits"] == {"max_concurrency": 3}, "as a whole, however the URL is written"
    cli("set", *at())
    (row,) = cli("show")
    assert row["limits"] == {}


def test_running_callers_follow_what_is_set_and_lifted(cli):
    settings = load_settings()

    async def call() -> None:
        pool = pool_of(settings)
        limiter = pool.limiter(ENDPOINT, MODEL)

        async def may_call(timeout_s: float) -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    lease = await limiter.acquire(run="r", estimated_tokens=0)
            except TimeoutError:
                return False
            lease.settle(0)
            return True

        held = [await limiter.acquire(run="r", estimated_tokens=0) for _ in range(5)]
        await asyncio.to_thread(cli, "set", *at(), "--max-concurrency", "5")
        tries = [await may_call(0.5)]
        while tries[-1] and len(tries) < 100:
            await asyncio.sleep(0.1)
            tries.append(await may_call(0.5))
        assert not tries[-1], "five are in flight, and no more may be"
        (row,) = await asyncio.to_thread(cli, "show")
        assert (row["in_flight"], row["cap"]) == (5, 5)
        await asyncio.to_thread(cli, "set", *at())
        assert await may_call(20)
        for lease in held:
            lease.settle(0)
        await pool.close()

    asyncio.run(call())


def test_a_limit_without_a_model_holds_for_a_model_whose_name_was_discovered(cli):
    settings = load_settings()
    cli("set", "--base-url", ENDPOINT, "--max-concurrency", "2")

    async def call() -> None:
        pool = pool_of(settings)
        held = [
            await pool.limiter(ENDPOINT, model).acquire(run="r", estimated_tokens=0)
            for model in ("discovered", "another")
        ]
        for model in ("discovered", "another", "a-third"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await pool.limiter(ENDPOINT, model).acquire(run="r", estimated_tokens=0)
        rows = {row["model"]: row for row in await asyncio.to_thread(cli, "show")}
        assert (rows["*"]["in_flight"], rows["*"]["cap"]) == (2, 2)
        assert rows["*"]["unused_since"] is None
        for lease in held:
            lease.settle(0)
        await pool.close()

    asyncio.run(call())


def test_a_limit_under_which_no_call_is_counted_is_told(cli, capsys):
    settings = load_settings()
    cli("set", *at(), "--max-concurrency", "2")

    async def call() -> None:
        pool = pool_of(settings)
        lease = await pool.limiter(ENDPOINT, "discovered").acquire(run="r", estimated_tokens=0)
        lease.settle(0)
        await pool.close()

    asyncio.run(call())
    rows = {row["model"]: row for row in cli("show")}
    assert rows[MODEL]["unused_since"] is not None
    assert rows["discovered"]["unused_since"] is None, "no limit is set for it"
    assert run_command(["limits", "show"]) == 0
    told = capsys.readouterr().out
    assert f"Limits of {MODEL} at {ENDPOINT} are set, but no call has been counted" in told
    assert "Calls there are made for: discovered." in told


@pytest.mark.parametrize("options", [("--requests-per-minute", "0"), ("--max-concurrency", "-1")])
def test_a_limit_that_means_nothing_is_a_usage_error(cli, options):
    assert cli("set", *at(), *options, code=2)["error"]["code"] == "E002"


def test_a_redis_that_is_away_is_named(cli, monkeypatch):
    monkeypatch.setenv("ROLLOUT_LIMITS__REDIS_URL", "redis://:planted-pw@127.0.0.1:1/0")
    error = cli("show", code=6)["error"]
    assert error["code"] == "E205"
    assert "ROLLOUT_LIMITS__REDIS_URL" in error["remedy"]
    assert "planted-pw" not in json.dumps(error)


def test_without_any_redis_nothing_can_be_shared(cli, monkeypatch):
    monkeypatch.setenv("ROLLOUT_BROKER__URL", "amqp://guest:guest@127.0.0.1:5672//")
    assert cli("show", code=3)["error"]["code"] == "E101"
