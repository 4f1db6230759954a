"""The record of a model call: made before the agent sees the answer, stored in two bodies."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

from fixtures.stored_run import StoredRun

from pipeline.contract.trajectory import digest_of, unpack_record
from pipeline.tokens.token_body import unpack_tokens
from workers.core.model_response import ModelResponse
from workers.core.registry import register_agent
from workers.process.attempt import Attempt

FIRST = ModelResponse(
    "Action: calculator(expression='1+1')",
    finish_reason="stop",
    prompt_tokens=3,
    completion_tokens=2,
    model="qwen",
    prompt_token_ids=[1, 2, 3],
    completion_token_ids=[4, 5],
    logprobs=[-0.5, -0.25],
    policy_version=7,
    latency_ms=12.5,
    metadata={"sampling": {"temperature": 0.5}, "token_source": "choice"},
)
SECOND = dataclasses.replace(
    FIRST,
    text="Final Answer: 2",
    prompt_token_ids=[1, 2, 3, 4, 5, 6],
    completion_token_ids=[8],
    logprobs=[-1.0],
    completion_tokens=1,
    metadata={**FIRST.metadata, "policy_version_before": 6},
)


def test_a_call_is_recorded_with_all_that_is_known_of_it(engine, make_worker):
    story = StoredRun(engine, agent="react", tools=["calculator"])
    worker = make_worker(FIRST, SECOND)
    (completion,) = worker.work(story)
    first, second = unpack_record(completion.body).calls
    assert (first.sequence, second.sequence) == (0, 1)
    assert (first.model, first.finish_reason, first.latency_ms) == ("qwen", "stop", 12.5)
    assert (first.prompt_tokens, first.completion_tokens) == (3, 2)
    assert first.response == {"role": "assistant", "content": FIRST.text}
    assert (first.token_source, first.sampling) == ("choice", {"temperature": 0.5})
    assert first.trainable
    assert not first.replayed
    assert (first.version_min, second.version_min) == (7, 6)
    assert (completion.version_min, completion.version_max) == (6, 7)


def test_recorded_ids_are_counted_where_the_server_reports_no_usage(engine, make_worker):
    story = StoredRun(engine, agent="react", tools=["calculator"])
    no_usage = {"prompt_tokens": None, "completion_tokens": None}
    calls = [dataclasses.replace(each, **no_usage) for each in (FIRST, SECOND)]
    (completion,) = make_worker(*calls).work(story)
    assert (completion.prompt_tokens, completion.completion_tokens) == (3 + 6, 2 + 1)


def test_tokens_are_stored_beside_the_body_and_in_no_json(engine, make_worker):
    story = StoredRun(engine, agent="react", tools=["calculator"])
    make_worker(FIRST, SECOND).work(story)
    (row,) = story.rows("SELECT body, tokens, tokens_digest, tokens_bytes FROM trajectories")
    assert row["tokens_digest"] == digest_of(row["tokens"])
    assert row["tokens_bytes"] == len(row["tokens"])
    calls = unpack_tokens(row["tokens"])
    assert [call.prompt.tolist() for call in calls] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]  # type: ignore[union-attr]
    assert [call.completion.tolist() for call in calls] == [[4, 5], [8]]  # type: ignore[union-attr]
    assert [call.logprobs.tolist() for call in calls] == [[-0.5, -0.25], [-1.0]]  # type: ignore[union-attr]
    assert [call.version for call in calls] == [7, 6]
    record = unpack_record(row["body"])
    assert all(step["log_probs"] is None for step in record.steps)
    assert not any("token_ids" in key for step in record.steps for key in step["metadata"])


def test_a_call_without_ids_is_recorded_as_text_and_not_trained(engine, make_worker):
    story = StoredRun(engine, agent="single_turn")
    (completion,) = make_worker("42").work(story)
    assert (completion.tokens, completion.tokens_digest) == (b"", None)
    (call,) = unpack_record(completion.body).calls
    assert call.response == {"role": "assistant", "content": "42"}
    assert not call.trainable


def test_an_aborted_call_keeps_its_tokens_and_is_not_trained(engine, make_worker):
    story = StoredRun(engine, agent="single_turn")
    aborted = dataclasses.replace(FIRST, finish_reason="abort")
    (completion,) = make_worker(aborted).work(story)
    (call,) = unpack_tokens(completion.tokens)
    assert (call.finish_reason, call.trainable) == ("abort", False)


def test_a_running_attempt_holds_no_prompt_ids_as_a_list(engine, make_worker):
    """Fifty prompts of long conversations would take 30 MB in each running attempt."""

    class Ids(list[int]):
        """A list that can be watched."""

    watched: list[weakref.ref[Ids]] = []
    held: list[bool] = []

    def answer() -> ModelResponse:
        ids = Ids([1, 2, 3])
        watched.append(weakref.ref(ids))
        return dataclasses.replace(FIRST, prompt_token_ids=ids)

    @register_agent("long")
    async def long(prompt: Any, llm: Any) -> str:
        for _ in range(2):
            await llm([{"role": "user", "content": "?"}])
        gc.collect()
        held.extend(ids() is not None for ids in watched)
        return "1"

    (completion,) = make_worker(answer).work(StoredRun(engine, agent="long"))
    assert completion.outcome == "succeeded"
    assert held == [False, False]


def test_an_attempt_that_ended_is_freed_at_once(engine, make_worker):
    """A garbage collection comes too late: one attempt may hold megabytes of tokens."""
    story = StoredRun(engine, agent="react", tools=["calculator"])
    worker = make_worker(FIRST, SECOND)
    gc.collect()
    others = attempts()  # of tests whose agents do not stop
    gc.disable()
    try:
        worker.work(story)
        assert [each for each in attempts() if each not in others] == []
    finally:
        gc.enable()


def attempts() -> list[Attempt]:
    return [each for each in gc.get_objects() if type(each) is Attempt]
