"""What agents, tools and rewards may do wrong: each has a code, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun
from outcomes import outcome
from pyarrow import parquet
from sqlalchemy import Engine

from pipeline.contract.errors import AgentError, ErrorClass
from pipeline.queue.payloads import FolderPayloads
from pipeline.trainer.export import export_run
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.registry import register_agent
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.rewards.registry import register_reward

E = ErrorClass
WorkerMaker = Callable[..., ScriptedWorker]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.process.scoring.SCORING_WAIT_S", 0.0)


# Agents


@pytest.mark.parametrize("given", [None, 42, {"answr": "42"}, ["42"], b"42"])
def test_an_agent_that_returns_no_answer_fails_at_once(engine, make_worker, given):
    @register_agent("odd")
    async def odd(prompt: dict[str, Any], llm: Any) -> Any:
        return given

    story = StoredRun(engine, agent="odd")
    assert outcome(story, make_worker()) == ("failed", None, E.CONTRACT, "agent_result")


def test_an_agent_nobody_registered_fails_and_says_which_there_are(engine, make_worker):
    story = StoredRun(engine, agent="nobody")
    assert outcome(story, make_worker()) == ("failed", None, E.CONTRACT, "agent_setup")
    (attempt,) = story.rows("SELECT * FROM attempts")
    assert "Known agents: " in attempt["error_message"]


@pytest.mark.parametrize("names", [{"tools": ("nothing",)}, {"agent_config": {"max_steps": 0}}])
def test_a_tool_or_option_that_does_not_exist_fails_at_once(engine, make_worker, names):
    story = StoredRun(engine, agent="react", **names)
    assert outcome(story, make_worker()) == ("failed", None, E.CONTRACT, "agent_setup")


@pytest.mark.parametrize(
    ("asked", "code", "meant"),
    [
        ({"agent_config": {"max_stpes": 3}}, "agent_option", "Did you mean 'max_steps'?"),
        ({"agent_config": {"max_steps": "abc"}}, "agent_option", "max_steps cannot be 'abc'"),
        ({"tools_config": {"calculator": {"presision": 3}}}, "tool_option", "'precision'?"),
        ({"tools_config": {"calclator": {}}}, "tool_option", "Did you mean 'calculator'?"),
        ({"reward_config": {"tolerence": 3}}, "reward_option", "Did you mean 'tolerance'?"),
        ({"reward": "exakt_match"}, "unknown_reward", "exact_match"),
    ],
)
def test_what_cannot_work_fails_before_a_model_is_called(engine, make_worker, asked, code, meant):
    story = StoredRun(engine, **{"agent": "react", "tools": ("calculator",), **asked})
    worker = make_worker("42")
    assert outcome(story, worker) == ("failed", None, E.CONTRACT, code)
    (attempt,) = story.rows("SELECT * FROM attempts")
    assert meant in attempt["error_message"]
    assert worker.client.calls == []


def test_an_agent_that_calls_for_ever_ends_by_its_clock_and_has_no_answer(engine, make_worker):
    @register_agent("endless")
    async def endless(prompt: dict[str, Any], llm: Any) -> str:
        while True:
            await llm("And now?")
            await asyncio.sleep(0.01)

    story = StoredRun(engine, agent="endless", limits={"timeout_s": 0.1})
    worker = make_worker("1")
    # A reply that the agent did not return is no answer, though it would be right.
    assert outcome(story, worker) == ("succeeded", 0.0, None, None)
    assert story.rollouts()[0]["stop_reason"] == "agent_timeout"
    assert len(worker.client.calls) > 1


def test_an_agent_that_runs_out_of_memory_is_retried_a_few_times(engine, make_worker):
    @register_agent("hungry")
    async def hungry(prompt: dict[str, Any], llm: Any) -> str:
        return str(len(bytearray(2**60)))

    story = StoredRun(engine, agent="hungry", max_attempts=2)
    assert outcome(story, make_worker()) == ("failed", None, E.AGENT_BUG, "agent_raised")
    assert story.rollouts()[0]["attempts_used"] == 2


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class _Outcome(BaseException):
    """As test runners raise them."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_Unspeakable(), "_Unspeakable: (its text cannot be shown: RuntimeError)"),
        (asyncio.CancelledError(), "its attempt was not cancelled"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (SystemExit(3), "called sys.exit(3)"),
        (_Outcome(), "raised _Outcome"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_however_an_agent_ends_its_rollout_has_an_outcome(engine, make_worker, error, says):
    @register_agent("rude")
    async def rude(prompt: dict[str, Any], llm: Any) -> str:
        await asyncio.sleep(0)
        raise error

    story = StoredRun(engine, agent="rude", max_attempts=2)
    assert outcome(story, make_worker())[2:] == (E.AGENT_BUG, "agent_raised")
    assert story.rollouts()[0]["attempts_used"] == 2, "retried, and within the budget"
    (told,) = story.rows("SELECT DISTINCT error_message FROM attempts")
    assert says in told["error_message"]


def test_a_code_that_an_agent_made_up_is_stored(engine, make_worker):
    @register_agent("coded")
    async def coded(prompt: dict[str, Any], llm: Any) -> str:
        raise AgentError("no", code="a\0b\ud83d" + "c" * 500, retry_after_s=math.inf)

    story = StoredRun(engine, agent="coded", max_attempts=1)
    code = outcome(story, make_worker())[3]
    assert (code[:5], len(code)) == ("a\\0b?", 100)


@pytest.mark.parametrize("junk", [object(), {1, 2}, b"\xff", 10**5000], ids=type)
def test_what_cannot_be_recorded_fails_its_rollout_and_no_other(engine, make_worker, junk):
    @register_agent("hoarder")
    async def hoarder(prompt: dict[str, Any], llm: Any, trajectory: Trajectory) -> str:
        step = TrajectoryStep(StepType.THOUGHT, "hm", {"chat_message": {"role": "x", "it": junk}})
        trajectory.add_step(step)
        return "1"

    story = StoredRun(engine, agent="hoarder")
    state, reward, error_class, code = outcome(story, make_worker())
    assert (state, reward, error_class, code) == ("failed", None, E.CONTRACT, "unrecordable")
    assert len(story.rows("SELECT * FROM trajectories")) == 1, "there is a record that says so"


def test_an_agent_may_return_a_trajectory_of_its_own_making(engine, make_worker):
    @register_agent("own")
    async def own(prompt: dict[str, Any], llm: Any) -> Trajectory:
        return Trajectory("mine", [TrajectoryStep(StepType.FINAL_ANSWER, "1")])

    assert outcome(StoredRun(engine, agent="own"), make_worker())[:2] == ("succeeded", 1.0)


# Tools


@pytest.mark.parametrize("arguments", ["{not json", "[1]", '{"expression": 3, "more": 1}', ""])
def test_tool_arguments_that_do_not_parse_are_told_to_the_model(engine, make_worker, arguments):
    call = ModelResponse("", (NativeToolCall("c1", "calculator", arguments),))
    story = StoredRun(
        engine, agent="react", agent_config={"native_tools": True}, tools=("calculator",)
    )
    worker = make_worker(call, "Final Answer: 1")
    assert outcome(story, worker)[:2] == ("succeeded", 1.0)
    told = worker.client.calls[1][-1]
    assert (told["role"], told["tool_call_id"]) == ("tool", "c1")
    assert "rror" in told["content"]


# Rewards


@pytest.mark.parametrize(
    ("value", "error_class", "code"),
    [
        (RuntimeError("no"), E.REWARD_ERROR, "reward_raised"),
        (math.nan, E.REWARD_ERROR, "not_finite"),
        (-math.inf, E.REWARD_ERROR, "not_finite"),
        ("0.5", E.CONTRACT, "reward_type"),
        (None, E.CONTRACT, "reward_type"),
        ({"score": 1.0}, E.CONTRACT, "reward_type"),
        ([], E.CONTRACT, "reward_type"),
        (SystemExit(1), E.REWARD_ERROR, "reward_raised"),
        (KeyboardInterrupt(), E.REWARD_ERROR, "reward_raised"),
        (asyncio.CancelledError(), E.REWARD_ERROR, "reward_raised"),
        (_Unspeakable(), E.REWARD_ERROR, "reward_raised"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else repr(value),
)
def test_a_reward_that_is_none_leaves_an_error_and_no_value(
    engine, make_worker, value, error_class, code
):
    @register_reward("odd", inline=True)
    def odd(response: str) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    story = StoredRun(engine, reward="odd")
    assert outcome(story, make_worker()) == ("failed", None, error_class, code)
    (row,) = story.rows("SELECT name, value, status, error_class FROM rewards")
    assert tuple(row.values()) == ("odd", None, "error", error_class)


def test_a_reward_nobody_registered_fails_and_says_which_there_are(engine, make_worker):
    story = StoredRun(engine, reward="nobody")
    assert outcome(story, make_worker()) == ("failed", None, E.CONTRACT, "unknown_reward")


def test_a_reward_that_never_answers_is_given_up(engine, make_worker, monkeypatch):
    monkeypatch.setattr("workers.process.scoring.SCORING_TRIES", 1)

    @register_reward("silent")
    async def silent(response: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    story = StoredRun(engine, reward="silent", limits={"reward_timeout_s": 0.05})
    assert outcome(story, make_worker()) == ("failed", None, E.REWARD_ERROR, "reward_timeout")


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_a_lone_surrogate_of_an_agent_is_kept_and_exported(
    engine: Engine, make_worker: WorkerMaker, tmp_path: Path, to: Any
):
    text = "a\ud83db"
    story = StoredRun(engine, reward="exact_match")
    assert outcome(story, make_worker(text))[0] == "succeeded"
    path = tmp_path / "out"
    report = export_run(engine, story.run, path, to=to, payloads=FolderPayloads(tmp_path))
    assert (report.rollouts, report.unreadable) == (1, 0)
    if to == "jsonl":
        messages = json.loads(path.read_bytes())["messages"]
    else:
        messages = json.loads(parquet.read_table(path)["messages"][0].as_py())
    assert messages[-1]["content"] == text


def test_an_error_that_quotes_what_a_model_wrote_is_stored(engine, make_worker):
    @register_agent("quotes")
    async def quotes(prompt: dict[str, Any], llm: Any) -> str:
        raise ValueError("it wrote " + (await llm("Say.")).text)

    story = StoredRun(engine, agent="quotes", max_attempts=1)
    assert outcome(story, make_worker("a\0b\ud83dc"))[2] == E.AGENT_BUG
    (attempt,) = story.rows("SELECT * FROM attempts")
    assert attempt["error_message"] == "ValueError: it wrote a\\0b?c"


def test_reward_parts_may_have_any_name(engine, make_worker):
    @register_reward("parts", inline=True)
    def parts(response: str) -> dict[str, float]:
        return {"reward": 1.0, "a\0b": 1.0, "\ud83d": 2.0}

    story = StoredRun(engine, reward="parts")
    assert outcome(story, make_worker())[:2] == ("succeeded", 1.0)
    names = {row["name"] for row in story.rows("SELECT name FROM rewards")}
    assert names == {"parts", "parts.a\\0b", "parts.?"}


@pytest.mark.parametrize("parts", [{"x" * 201: 1.0}, {"a\0b": 1.0, "a\\0b": 2.0}])
def test_reward_parts_that_cannot_be_stored_fail_in_the_words_of_the_reward(
    engine, make_worker, parts
):
    @register_reward("parts", inline=True)
    def of_parts(response: str) -> dict[str, float]:
        return {"reward": 1.0, **parts}

    story = StoredRun(engine, reward="parts")
    assert outcome(story, make_worker()) == ("failed", None, E.CONTRACT, "reward_part_name")
    (attempt,) = story.rows("SELECT * FROM attempts")
    assert "'parts'" in attempt["error_message"]
    assert len(story.rows("SELECT * FROM trajectories")) == 1
