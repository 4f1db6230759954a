"""The README's code, run as it stands: plug-in, dataset, run commands, trainer loop.

Its prompts go through the store, the dispatcher, a worker runtime and the trainer client; only the
broker between them is left out, and the model is scripted.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.offline_policy import serving
from sqlalchemy import Engine, text

from pipeline.contract.messages import Completion, RolloutRequest
from pipeline.contract.policy import Policy
from pipeline.contract.run import RunConfig
from pipeline.dispatcher import Dispatcher
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.outcomes import record_outcomes
from pipeline.store.prompts import PromptSource
from producers.datasets import read_prompts
from producers.enqueue import EnqueueReport, enqueue
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.registry import clear_registry
from workers.core.tool_registry import get_global_tool_registry
from workers.llm.providers import make_client
from workers.offline_policy.policy import OfflinePolicyOptions
from workers.process.execution import execute
from workers.process.plugins import load_plugins
from workers.process.runtime import Runtime
from workers.rewards.registry import clear_rewards

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")

SQUARES = {"What is 12 * (3 + 4)?": 84**2, "What is 90 / 6 + 2?": 17**2}
WRONG_INDEX = 3


def fenced(language: str, holding: str) -> str:
    """Return the one block of a language that holds a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if holding in block]
    return found


def options_of(holding: str) -> dict[str, str]:
    """Return the options of the README's one `rollout run` command that holds a text."""
    joined = README.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.startswith("rollout run ")]
    (found,) = [shlex.split(line) for line in lines if holding in line]
    words = found[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


class ScriptedModel:
    """Asks for the square root first, then answers what it was told; one rollout does not know."""

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        if options["user"].endswith(f"-r{WRONG_INDEX}"):
            return ModelResponse(text="I do not know.")
        if messages[-1]["role"] == "tool":
            return ModelResponse(text=messages[-1]["content"])
        assert [schema["function"]["name"] for schema in options["tools"]] == [
            "square_root",
            "calculator",
        ]
        arguments = json.dumps({"x": SQUARES[messages[0]["content"]]})
        return ModelResponse(text="", tool_calls=(NativeToolCall("c1", "square_root", arguments),))


class KeptRequests:
    """Takes the place of the broker: keeps what the dispatcher publishes."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    def publish(self, requests: Sequence[RolloutRequest], *, queue: str) -> None:
        self.requests += requests

    def announce_policies(self, policies: Sequence[Policy]) -> None:
        assert not policies

    def close(self) -> None:
        pass


@pytest.fixture
def settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> Iterator[Settings]:
    """Settings in a folder with the README's files, as a reader would make it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text(fenced("json", "question"))
    (tmp_path / "my_plugin.py").write_text(fenced("python", "register_agent"))
    yield make_settings(llm={"base_url": "http://127.0.0.1:9/v1"})
    clear_registry()
    clear_rewards()
    get_global_tool_registry().clear_registry()
    sys.modules.pop("rollout_plugin_my_plugin", None)


def submitted(engine: Engine, options: Mapping[str, str], **more: Any) -> EnqueueReport:
    config = RunConfig(
        agent=options["--agent"],
        tools=tuple(options["--tools"].split(",")),
        reward=options["--reward"],
        n=int(options.get("-n", 4)),
        **more,
    )
    return enqueue(
        engine,
        run=options.get("--run", "sums"),
        config=config,
        source=PromptSource("questions"),
        prompts=read_prompts("questions.jsonl"),
    )


async def worked_off(engine: Engine, settings: Settings, runtime: Runtime) -> list[Completion]:
    """Do what dispatcher, workers and collector do with everything that is queued."""
    broker = KeptRequests()
    dispatcher = Dispatcher(engine, broker, settings)  # pyright: ignore[reportArgumentType]
    dispatcher.step()
    dispatcher.close()
    completions = await asyncio.gather(*(execute(request, runtime) for request in broker.requests))
    transact(engine, lambda connection: record_outcomes(connection, completions))
    return completions


async def test_the_plugin_runs_and_the_trainer_pulls_its_groups(
    engine: Engine,
    database_url: str,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = options_of("--plugin")
    load_plugins([options["--plugin"]])
    report = submitted(engine, options)
    runtime = Runtime(settings, "w1", make_client=lambda *_: ScriptedModel())

    completions = await worked_off(engine, settings, runtime)

    assert [completion.error for completion in completions] == [None] * report.rollouts
    assert report.rollouts == 8
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", database_url)
    program = compile(fenced("python", "TrainerClient"), "README.md", "exec")
    await asyncio.to_thread(exec, program, {})
    assert Path("checkpoint").read_text() == "0"
    trained = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert sorted(advantage for advantage, _ in trained) == ["+0.25"] * 6 + ["-0.75"] * 2
    assert {said for _, said in trained} == {"84.0", "17.0", "I do not know."}
    with engine.connect() as connection:
        states = connection.execute(text("SELECT state FROM groups")).scalars().all()
    assert states == ["consumed"] * 2


async def test_the_first_run_command_solves_its_dataset(engine: Engine, settings: Settings) -> None:
    async with (
        serving(OfflinePolicyOptions()) as (base_url, _),
        make_client(base_url=base_url) as client,
    ):
        report = submitted(engine, options_of("--run sums"), base_url=base_url)
        runtime = Runtime(settings, "w1", make_client=lambda *_: client)
        completions = await worked_off(engine, settings, runtime)

    assert len(completions) == report.rollouts == 8
    assert math.fsum(completion.reward or 0.0 for completion in completions) == 8.0
    assert {completion.n_turns for completion in completions} == {2}
