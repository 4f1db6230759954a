"""The Python of the documents, run as it stands: enqueueing, rewards, what a trainer reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.contract.train_batch import BatchSpec
from pipeline.trainer.async_client import AsyncTrainerClient
from pipeline.trainer.client import TrainerClient
from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.core.model_response import ModelResponse
from workers.core.registry import clear_registry, register_agent
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.rewards.registry import clear_rewards, score
from workers.rewards.reward_result import RewardResult

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    yield
    clear_registry()
    clear_rewards()


def run_snippet(document: str, holding: str, **names: Any) -> dict[str, Any]:
    """Execute the one Python block of a document that holds a text; return its names."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / document).read_text(), re.M | re.S)
    (found,) = [block for block in blocks if holding in block]
    exec(compile(found, document, "exec"), names)
    return names


def test_a_run_is_enqueued_from_python_once(
    engine: Engine,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", database_url)
    run_snippet("runs.md", "enqueue(")
    run_snippet("runs.md", "enqueue(")
    assert capsys.readouterr().out.splitlines() == [
        "2 prompts, 8 rollouts; 2 prompts are new",
        "2 prompts, 8 rollouts; 0 prompts are new",
    ]
    with engine.connect() as connection:
        payloads = connection.execute(text("SELECT payload FROM prompts ORDER BY row_no"))
        assert payloads.scalars().first() == {"content": "What is 12 * (3 + 4)?", "answer": "84"}


async def test_rewards_take_and_return_what_the_document_says() -> None:
    run_snippet("agents.md", '@register_reward("brief")')
    prompt = {"content": "?", "answer": "42", "level": "hard"}
    assert await score("brief", response="42", prompt=prompt) == RewardResult(
        1.0, {"right": 1.0, "short": 1.0}
    )
    assert await score("brief", response="42", prompt=prompt, config={"longest": 1}) == (
        RewardResult(0.5, {"right": 1.0, "short": 0.0})
    )
    trajectory = Trajectory("r", [TrajectoryStep(StepType.ACTION, "", tool_name="search")])
    assert await score("quiet", response="", prompt=prompt, trajectory=trajectory) == (
        RewardResult(0.5, {"calls": 1.0, "hard": 1.0})
    )


async def test_an_agent_function_takes_its_options_from_the_config() -> None:
    run_snippet("agents.md", "hint: str", register_agent=register_agent)
    asked: list[str] = []

    async def model(messages: list[dict[str, Any]], **_: Any) -> str:
        asked.append(messages[0]["content"])
        return "42"

    config = AgenticRolloutConfig(agent_type="solver", agent_config={"hint": "Be brief."})
    await AgenticRollout(config, model).run_batch(["What is 6 * 7?"])
    assert asked == ["Be brief.\nWhat is 6 * 7?"]


def test_a_trainer_reads_what_the_document_says(
    engine: Engine, make_settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    story = StoredRun(engine, prompts=2, n=2)
    reply = ModelResponse("42", prompt_token_ids=[1, 2], completion_token_ids=[3])
    ScriptedWorker(make_settings(llm={"base_url": "http://127.0.0.1:9/v1"}), reply).work(story)
    client = TrainerClient(engine, run=story.run.slug)
    run_snippet("training.md", "group.reward_mean", client=client, BatchSpec=BatchSpec)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert all("answered" in line for line in said)
    batch = client.pull(0, BatchSpec(groups=2))
    client.close()
    run_snippet("training.md", "in batch.rows()", batch=batch)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    assert all(" 0 3 1 " in line for line in rows)
    run_snippet("training.md", "batch.shard(0, 2)", batch=batch)
    assert capsys.readouterr().out == "(2, 3) 2\n"


def test_a_trainer_publishes_and_prefetches_as_the_document_says(engine: Engine) -> None:
    story = StoredRun(engine, prompts=4, n=2)
    story.record(*(story.succeeded(a, float(a.rollout_index)) for a in story.claim()))
    client = TrainerClient(engine, run=story.run.slug)
    names = run_snippet("training.md", "publish_policy(0)", client=client, BatchSpec=BatchSpec)
    assert (
        sorted(round(value, 2) for value in names["advantages"].values())
        == [-0.71] * 2 + [0.71] * 2
    )
    assert client.stats().groups["consumed"] == 2
    assert run_snippet("training.md", "client.enqueue(", client=client)["cancelled"] == 2

    async def work() -> list[int]:
        other = TrainerClient(engine, run=story.run.slug, consumer="other")
        async with AsyncTrainerClient(other) as trainer:
            spec = BatchSpec(groups=1)
            batch = await run_snippet("training.md", "trainer.prefetch")["train"](trainer, spec)
            return [group.group_no for group in batch.groups]

    assert asyncio.run(work()) == [3]
    client.close()
