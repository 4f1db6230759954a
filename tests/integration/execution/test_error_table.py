"""Every class of the error table, from the code that goes wrong to the rows in the store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import (
    ERROR_TABLE,
    Action,
    ContextOverflow,
    ErrorClass,
    ModelBadRequest,
    ModelRateLimit,
    ModelTransportError,
)
from pipeline.contract.messages import Completion
from pipeline.contract.trajectory import unpack_record
from pipeline.requests import request_of
from workers.core.registry import register_agent
from workers.core.tool_registry import tool
from workers.process.agent_timeout import off_the_clock
from workers.process.execution import execute
from workers.rewards.registry import register_reward
from workers.sandbox.base import SandboxFailure

CALL = "Action: breaks()"
E = ErrorClass


@dataclass(frozen=True)
class Misbehaviour:
    """What goes wrong: a model's replies, an agent, a tool or a reward of the run."""

    replies: tuple[Any, ...] = ("42",)
    agent: str = "single_turn"
    tools: tuple[str, ...] = ()
    reward: str = "numeric"
    limits: dict[str, Any] | None = None
    good_replies: tuple[Any, ...] = ("1",)

    def config(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "tools": self.tools,
            "reward": self.reward,
            "limits": self.limits or {},
        }


MISBEHAVIOURS = {
    E.MODEL_RATE_LIMIT: Misbehaviour((ModelRateLimit("slow down", retry_after_s=0.0),)),
    E.MODEL_TRANSPORT: Misbehaviour((ModelTransportError("reset"),)),
    E.MODEL_BAD_REQUEST: Misbehaviour((ModelBadRequest("no such model"),)),
    E.CONTEXT_OVERFLOW: Misbehaviour((ContextOverflow("too long"),)),
    E.POLICY_LIMIT: Misbehaviour(("Thought: hm",), agent="react", limits={"max_steps": 4}),
    E.AGENT_TIMEOUT: Misbehaviour(agent="sleeps", limits={"timeout_s": 0.05}),
    E.TOOL_ERROR: Misbehaviour((CALL, "Final Answer: 1"), agent="react", tools=("breaks",)),
    E.SANDBOX: Misbehaviour((CALL, "Final Answer: 1"), agent="react", tools=("unboxed",)),
    E.REWARD_ERROR: Misbehaviour(reward="raises"),
    E.AGENT_BUG: Misbehaviour(agent="raises"),
    E.CONTRACT: Misbehaviour(agent="returns_nothing"),
}
#: Said by the reconciler and the stopping worker, not by anything that runs in an attempt.
SAID_BY_OTHERS = {E.WORKER_LOST, E.WORKER_STOPPED, E.POISON}

each_class = pytest.mark.parametrize("error_class", sorted(MISBEHAVIOURS))


@pytest.fixture(autouse=True)
def _misbehaving_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.process.scoring.SCORING_WAIT_S", 0.0)

    @register_agent("sleeps")
    async def sleeps(prompt: dict[str, Any], llm: Any) -> str:
        await llm("Are you there?")
        await asyncio.sleep(60)
        return "late"

    @register_agent("raises")
    async def raises(prompt: dict[str, Any], llm: Any) -> str:
        await llm("Are you there?")
        raise KeyError("gold")

    @register_agent("returns_nothing")
    async def returns_nothing(prompt: dict[str, Any], llm: Any) -> None:
        await llm("Are you there?")

    @tool
    def breaks() -> str:
        """Break."""
        raise OSError("the tool broke")

    @tool
    def unboxed() -> str:
        """Need a sandbox."""
        raise SandboxFailure("bwrap died")

    @register_reward("raises", inline=True)
    def raising_reward(response: str) -> float:
        raise RuntimeError("no judge")


def replies_of(error_class: ErrorClass) -> tuple[Any, ...]:
    replies = MISBEHAVIOURS[error_class].replies
    if error_class is E.SANDBOX:
        return ("Action: unboxed()", *replies[1:])
    return replies


def tell(engine: Engine, error_class: ErrorClass, **config: Any) -> StoredRun:
    return StoredRun(engine, **{**MISBEHAVIOURS[error_class].config(), **config})


def test_every_class_has_something_that_causes_it():
    assert set(MISBEHAVIOURS) | SAID_BY_OTHERS == set(ErrorClass)


@each_class
def test_the_default_action_of_each_class_is_what_the_table_says(engine, make_worker, error_class):
    story = tell(engine, error_class, max_attempts=2)
    worker = make_worker(*replies_of(error_class))
    (said,) = worker.work(story)
    (rollout,) = story.rollouts()
    match ERROR_TABLE[error_class]:
        case Action.SCORE | Action.OBSERVE:
            assert (said.outcome, rollout["state"]) == ("succeeded", "succeeded")
            assert rollout["reward"] is not None
        case Action.RETRY | Action.RETRY_FREE as action:
            assert said.error_class is error_class
            assert (rollout["state"], rollout["reward"]) == ("queued", None)
            assert rollout["attempts_used"] == (action is Action.RETRY)
        case _:
            assert said.error_class is error_class
            assert (rollout["state"], rollout["error_class"]) == ("failed", error_class)
            assert rollout["reward"] is None


@each_class
def test_an_error_keeps_class_code_message_traceback_phase_and_trajectory(
    engine, make_worker, error_class
):
    story = tell(engine, error_class, on_error={error_class: Action.FAIL})
    make_worker(*replies_of(error_class)).work(story)
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["error_class"]) == ("failed", error_class)
    assert (rollout["reward"], rollout["stop_reason"]) == (None, None)
    (attempt,) = story.rows("SELECT * FROM attempts WHERE run_id = :run_id")
    assert attempt["error_class"] == error_class
    assert attempt["error_code"]
    assert attempt["error_message"]
    assert attempt["phase"] in ("generating", "scoring")
    assert attempt["error_detail"].startswith("Traceback")
    (kept,) = story.rows(
        "SELECT t.* FROM trajectories t JOIN rollouts r USING (rollout_id) WHERE run_id = :run_id"
    )
    assert unpack_record(kept["body"]).messages, "the partial trajectory is kept"


@each_class
def test_a_run_may_ask_for_a_retry_of_each_class(engine, make_worker, error_class):
    story = tell(engine, error_class, max_attempts=2, on_error={error_class: Action.RETRY})
    worker = make_worker(*replies_of(error_class))
    worker.work(story)
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["attempts_used"]) == ("queued", 1)
    worker.client._replies = list(replies_of(error_class))
    worker.work(story)
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["error_class"]) == ("failed", error_class)
    assert rollout["attempts_used"] == 2


@each_class
def test_a_run_may_ask_that_a_class_uses_no_attempt(engine, make_worker, error_class):
    story = tell(engine, error_class, max_attempts=1, on_error={error_class: Action.RETRY_FREE})
    make_worker(*replies_of(error_class)).work(story)
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["attempts_used"]) == ("queued", 0)


@pytest.mark.parametrize("error_class", [E.WORKER_LOST, E.WORKER_STOPPED])
@pytest.mark.parametrize("action", [Action.RETRY, Action.RETRY_FREE, Action.FAIL])
def test_a_run_may_change_what_a_lost_or_stopped_worker_means(engine, error_class, action):
    story = StoredRun(engine, on_error={error_class: action})
    story.record(story.failed(story.claim_one(), error_class))
    (rollout,) = story.rollouts()
    assert rollout["state"] == ("failed" if action is Action.FAIL else "queued")
    assert rollout["attempts_used"] == (action is not Action.RETRY_FREE)
    assert rollout["lost_count"] == 0


def test_a_rollout_whose_processes_die_is_poison_and_in_the_dead_letters(engine):
    story = StoredRun(engine, max_lost=2)
    for _ in range(2):
        story.record(story.died(story.claim_one()))
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["error_class"]) == ("failed", E.POISON)
    (letter,) = story.rows("SELECT * FROM dead_letters WHERE run_id = :run_id")
    assert (letter["kind"], letter["reason"]) == ("rollout", "poison")


def test_a_sandbox_that_dies_under_a_tool_is_no_observation(engine, make_worker):
    story = tell(engine, E.SANDBOX)
    worker = make_worker(*replies_of(E.SANDBOX))
    (said,) = worker.work(story)
    assert said.error is not None
    assert "bwrap died" in said.error.message
    assert len(worker.client.calls) == 1, "the model is told nothing"


def test_a_failing_scorer_is_tried_again_without_the_agent(engine, make_worker):
    failures = iter([RuntimeError("judge away"), RuntimeError("judge away")])

    @register_reward("recovers", inline=True)
    def recovers(response: str) -> float:
        if (failure := next(failures, None)) is not None:
            raise failure
        return 0.5

    story = StoredRun(engine, reward="recovers")
    worker = make_worker("42")
    (said,) = worker.work(story)
    assert (said.outcome, said.reward) == ("succeeded", 0.5)
    assert len(worker.client.calls) == 1


def test_an_agent_that_ends_the_interpreter_fails_alone(engine, make_worker):
    @register_agent("exits")
    async def exits(prompt: dict[str, Any], llm: Any) -> str:
        raise SystemExit(3)

    story = StoredRun(engine, agent="exits", max_attempts=1)
    (said,) = make_worker().work(story)
    assert said.error is not None
    assert (said.error.error_class, "sys.exit(3)" in said.error.message) == (E.AGENT_BUG, True)


def test_an_agent_that_will_not_stop_is_left_behind_and_calls_no_model(
    engine, make_worker, monkeypatch, caplog
):
    defaults = "workers.process.agent_timeout.run_within.__kwdefaults__"
    monkeypatch.setattr(defaults, {"cancel_grace_s": 0.05})
    refused: list[BaseException] = []

    @register_agent("stubborn")
    async def stubborn(prompt: dict[str, Any], llm: Any) -> str:
        await llm("Are you there?")
        while not refused:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
            if len(worker.client.calls) and said:
                try:
                    await llm("Still here?")
                except Exception as error:
                    refused.append(error)
        return "late"

    said: list[Any] = []
    story = StoredRun(engine, agent="stubborn", limits={"timeout_s": 0.05})
    worker = make_worker()

    async def run() -> None:
        said.append(await execute(request_of(story.run, story.claim_one()), worker.runtime))
        for _ in range(100):
            if refused:
                return
            await asyncio.sleep(0.02)

    asyncio.run(run())
    assert said[0].stop_reason == "agent_timeout"
    assert "left behind" in caplog.text
    assert "The attempt has ended" in str(refused[0])
    assert len(worker.client.calls) == 1


@pytest.mark.parametrize("waits", [False, True], ids=["calls later", "waits for a limit"])
def test_a_task_that_outlives_its_rollout_gets_a_clear_error(
    engine: Engine, make_worker, waits: bool
):
    ended = asyncio.Event()
    late: list[Any] = []

    @register_agent("careless")
    async def careless(prompt, llm):
        async def call_later() -> None:
            try:
                if waits:
                    await off_the_clock(ended.wait())
                else:
                    await ended.wait()
                await llm("Still here?")
            except Exception as error:
                late.append(error)

        late.append(asyncio.create_task(call_later()))
        await asyncio.sleep(0)
        return (await llm("2 + 2?")).text

    story = StoredRun(engine, agent="careless", reward=None)
    worker = make_worker("4")

    async def run() -> Completion:
        completion = await execute(request_of(story.run, story.claim_one()), worker.runtime)
        ended.set()
        await late[0]
        return completion

    said = asyncio.run(run())
    assert said.outcome == "succeeded"
    assert "must await all its tasks" in str(late[1])
    assert len(worker.client.calls) == 1
