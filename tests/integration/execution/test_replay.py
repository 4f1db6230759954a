"""A later attempt answers its first model calls from what an earlier one recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import ModelTransportError
from pipeline.contract.messages import Completion
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.queue.payloads import FolderPayloads
from pipeline.redaction import Redactor
from pipeline.store.engine import transact
from pipeline.store.inspection import read_rollout
from pipeline.store.policies import publish_policy
from pipeline.store.runs import get_run
from pipeline.store.status import run_status
from pipeline.tokens.token_body import unpack_tokens
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.registry import register_agent
from workers.core.tool_registry import tool
from workers.process import journal as journals

EVERY = {"journal": {"after_s": 0}}
TURNS = 4

MakeWorker = Callable[..., ScriptedWorker]


def turn(number: int) -> ModelResponse:
    """Return the answer in a conversation of one token for each message, and ten for an answer."""
    start = 12 * number
    return ModelResponse(
        f"thought {number}",
        finish_reason="stop",
        prompt_tokens=2 + start,
        completion_tokens=10,
        model="qwen",
        response_id=f"r{number}",
        prompt_token_ids=list(range(2 + start)),
        completion_token_ids=list(range(2 + start, 12 + start)),
        logprobs=[-0.25 * number] * 10,
        policy_version=7 + number,
        latency_ms=1000.0,
        metadata={"sampling": {"temperature": 0.5}, "policy_version_before": 7},
    )


def talkers_run(engine: Engine, **config: Any) -> StoredRun:
    """Return a run of an agent that talks for four turns."""

    @register_agent("talker")
    async def talker(prompt: dict[str, Any], llm: Any) -> str:
        messages = [{"role": "user", "content": prompt["content"]}]
        for _ in range(TURNS):
            response = await llm(messages)
            messages += [response.to_message(), {"role": "user", "content": "go on"}]
        return response.text

    return StoredRun(engine, agent="talker", reward=None, **config)


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    return talkers_run(engine)


def one_by_one(*, fails_at: int | None = None) -> Iterator[Any]:
    """Yield the answers of successive calls; the call of this number fails once."""
    for number in count():
        if number == fails_at:
            yield ModelTransportError("The server went away.", code="http_503")
        yield turn(number)


def record_of(completion: Completion) -> TrajectoryRecord:
    return unpack_record(completion.body, completion.codec)


def test_a_retried_rollout_goes_on_where_it_was(story: StoredRun, make_worker: MakeWorker) -> None:
    answers = one_by_one(fails_at=2)
    worker = make_worker(lambda: next(answers), **EVERY)
    failed, done = worker.work_off(story)
    assert (failed.outcome, failed.n_turns, failed.calls_replayed) == ("failed", 2, 0)
    assert (done.outcome, done.n_turns, done.calls_replayed) == ("succeeded", TURNS, 2)
    assert done.replayed_from == (1,)
    assert done.tokens_saved == 12 + 24
    # Three calls of the first attempt, one of which failed, and the two that were left.
    assert len(worker.client.calls) == 5


@pytest.mark.parametrize(
    ("published", "max_staleness", "replayed"),
    [(6, 2, 2), (7, 2, 1), (8, 2, 0), (9, None, 2), (0, 0, 2)],
)
def test_calls_that_are_too_stale_are_not_replayed(
    engine: Engine,
    make_worker: MakeWorker,
    published: int,
    max_staleness: int | None,
    replayed: int,
) -> None:
    """The first call counts with version 4, the smaller one; the second with 5."""
    first = replace(turn(0), policy_version=6, metadata={"policy_version_before": 4})
    second = replace(turn(1), policy_version=5, metadata={})
    lost = ModelTransportError("The server went away.", code="http_503")
    again = [first, second][: 2 - replayed]
    answers = iter([first, second, lost, *again, turn(2), turn(3)])
    story = talkers_run(engine, max_staleness=max_staleness)
    worker = make_worker(lambda: next(answers), **EVERY)
    worker.work(story)
    if published:
        transact(engine, lambda c: publish_policy(c, story.run, published))
        story.run = transact(engine, lambda c: get_run(c, story.run.slug))
    (done,) = worker.work(story)
    assert (done.outcome, done.n_turns, done.calls_replayed) == ("succeeded", TURNS, replayed)


def test_a_replayed_call_keeps_tokens_logprobs_and_versions(
    story: StoredRun, make_worker: MakeWorker, engine: Engine
) -> None:
    answers = one_by_one(fails_at=3)
    _, replayed = make_worker(lambda: next(answers), **EVERY).work_off(story)
    again = one_by_one()
    (straight,) = make_worker(lambda: next(again), **EVERY).work(
        StoredRun(engine, agent="talker", reward=None)
    )
    assert (replayed.calls_replayed, straight.calls_replayed) == (3, 0)
    assert record_of(replayed).messages == record_of(straight).messages
    assert record_of(replayed).steps == record_of(straight).steps
    calls, others = record_of(replayed).calls, record_of(straight).calls
    assert [call.replayed for call in calls] == [True, True, True, False]
    assert [call.model_copy(update={"replayed": False}) for call in calls] == others
    assert (replayed.version_min, replayed.version_max) == (7, 7)
    for call, other in zip(
        unpack_tokens(replayed.tokens), unpack_tokens(straight.tokens), strict=True
    ):
        assert call.prompt is not None
        assert call.completion is not None
        assert call.logprobs is not None
        assert call.prompt.tolist() == other.prompt.tolist()  # type: ignore[union-attr]
        assert call.completion.tolist() == other.completion.tolist()  # type: ignore[union-attr]
        assert call.logprobs.tolist() == other.logprobs.tolist()  # type: ignore[union-attr]
        assert (call.version, call.trainable) == (other.version, other.trainable)
    assert len(replayed.tokens) == pytest.approx(len(straight.tokens), rel=0.1)


def test_a_third_attempt_replays_the_calls_of_both_before(
    story: StoredRun, make_worker: MakeWorker
) -> None:
    answers = iter(
        [
            turn(0),
            ModelTransportError("The server went away.", code="http_503"),
            turn(1),
            turn(2),
            ModelTransportError("It timed out.", code="timeout"),
            turn(3),
        ]
    )
    *_, done = make_worker(lambda: next(answers), **EVERY).work_off(story)
    assert (done.calls_replayed, done.replayed_from) == (3, (1, 2))
    calls = unpack_tokens(done.tokens)
    assert calls[-1].prompt is not None
    assert calls[-1].prompt.tolist() == turn(3).prompt_token_ids


@pytest.mark.parametrize(("after_s", "frames"), [(0, 4), (2, 2), (5, 0), (-1, 0)])
def test_frames_are_sent_once_they_are_worth_keeping(
    story: StoredRun, make_worker: MakeWorker, after_s: float, frames: int
) -> None:
    answers = one_by_one()
    worker = make_worker(lambda: next(answers), journal={"after_s": after_s})
    made: list[Any] = []
    worker.runtime._keep = lambda make: made.append(make())
    worker.work(story)
    assert [frame.first for frame in made] == list(range(0, 4, max(1, int(after_s))))[:frames]


def test_without_a_frame_no_digest_is_computed(
    story: StoredRun, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "digest_of_request", None)
    answers = one_by_one()
    (done,) = make_worker(lambda: next(answers)).work(story)
    assert done.outcome == "succeeded"


def test_many_held_requests_become_digests(
    story: StoredRun, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_MOST_HELD", 3)
    answers = one_by_one(fails_at=3)
    failed, done = make_worker(lambda: next(answers)).work_off(story)
    assert (failed.outcome, done.calls_replayed) == ("failed", 3)


def test_what_was_recorded_is_sent_when_the_attempt_fails(
    story: StoredRun, make_worker: MakeWorker
) -> None:
    """Also if the calls took too little time for a frame of their own."""
    answers = one_by_one(fails_at=2)
    _, done = make_worker(lambda: next(answers)).work_off(story)
    assert done.calls_replayed == 2


def test_from_the_first_difference_on_the_model_is_asked(
    engine: Engine, make_worker: MakeWorker
) -> None:
    clock = count()

    @register_agent("clock_reader")
    async def clock_reader(prompt: dict[str, Any], llm: Any) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt["content"]}]
        messages.append((await llm(messages)).to_message())
        messages.append({"role": "user", "content": f"it is {next(clock)}"})
        for _ in range(2):
            messages.append((await llm(messages)).to_message())
            messages.append({"role": "user", "content": "go on"})
        return "done"

    answers = one_by_one(fails_at=2)
    story = StoredRun(engine, agent="clock_reader", reward=None)
    worker = make_worker(lambda: next(answers), **EVERY)
    _, done = worker.work_off(story)
    assert (done.calls_replayed, done.n_turns) == (1, 3)
    said = [m["content"] for m in record_of(done).messages if m["role"] == "user"]
    assert "it is 1" in said
    assert "it is 0" not in said


def test_parallel_calls_match_by_their_digests(engine: Engine, make_worker: MakeWorker) -> None:
    import asyncio

    order = iter([("a", "b", "c"), ("c", "b", "a")])

    @register_agent("parallel")
    async def parallel(prompt: dict[str, Any], llm: Any) -> str:
        async def ask(word: str) -> str:
            return (await llm(word)).text

        texts = await asyncio.gather(*map(ask, next(order)))
        return f"{texts} {(await llm('and now?')).text}"

    numbers = count()

    def answer() -> ModelResponse:
        number = next(numbers)
        if number == 3:
            raise ModelTransportError("The server went away.", code="http_503")
        return ModelResponse(f"answer {number}", finish_reason="stop", latency_ms=10.0)

    story = StoredRun(engine, agent="parallel", reward=None)
    _, done = make_worker(answer, **EVERY).work_off(story)
    assert done.calls_replayed == 3
    answer_text = record_of(done).final_answer
    assert answer_text == "['answer 2', 'answer 1', 'answer 0'] answer 4"


def test_tools_run_again(engine: Engine, make_worker: MakeWorker) -> None:
    ran: list[str] = []

    @tool
    def note(text: str) -> str:
        """Note a text."""
        ran.append(text)
        return f"noted {text}"

    call = NativeToolCall("c1", "note", '{"text": "x"}')
    answers = iter(
        [
            ModelResponse("", (call,), "tool_calls", latency_ms=10.0),
            ModelTransportError("The server went away.", code="http_503"),
            ModelResponse("done", finish_reason="stop", latency_ms=10.0),
        ]
    )
    story = StoredRun(engine, agent="tool", tools=["note"], reward=None)
    _, done = make_worker(lambda: next(answers), **EVERY).work_off(story)
    assert (done.outcome, done.calls_replayed) == ("succeeded", 1)
    assert ran == ["x", "x"]


def test_a_recorded_tool_runs_once_and_its_result_is_replayed(
    engine: Engine, make_worker: MakeWorker
) -> None:
    ran: list[str] = []

    @tool(replay="recorded")
    def look_up(text: str) -> dict[str, Any]:
        """Look a text up, for money."""
        ran.append(text)
        return {"found": f"{text} {len(ran)}"}

    @tool(replay="recorded")
    def tell_time() -> tuple[int, ...]:
        """Return a value that JSON would change."""
        ran.append("time")
        return (12, len(ran))

    def ask(name: str, arguments: str) -> ModelResponse:
        call = NativeToolCall(name, name, arguments)
        return ModelResponse("", (call,), "tool_calls", latency_ms=10.0)

    answers = iter(
        [
            ask("look_up", '{"text": "x"}'),
            ask("tell_time", "{}"),
            ModelTransportError("The server went away.", code="http_503"),
            ask("look_up", '{"text": "x"}'),
            ModelResponse("done", finish_reason="stop", latency_ms=10.0),
        ]
    )
    story = StoredRun(engine, agent="tool", tools=["look_up", "tell_time"], reward=None)
    _, done = make_worker(lambda: next(answers), **EVERY).work_off(story)
    # What is no JSON runs again; a second equal call is a call of its own.
    assert ran == ["x", "time", "time", "x"]
    record = record_of(done)
    results = [step["tool_result"] for step in record.steps if step["tool_result"] is not None]
    assert results[0] == {"found": "x 1"}
    assert results[-1] == {"found": "x 4"}
    assert done.calls_replayed == 2


def test_an_answer_with_a_secret_is_asked_for_again(
    story: StoredRun, make_worker: MakeWorker
) -> None:
    answers = iter(
        [
            turn(0),
            replace(turn(1), text="your key is hunter2-secret"),
            ModelTransportError("The server went away.", code="http_503"),
            turn(1),
            turn(2),
            turn(3),
        ]
    )
    worker = make_worker(lambda: next(answers), **EVERY)
    worker.runtime.redactor = Redactor(["hunter2-secret"])
    _, done = worker.work_off(story)
    assert (done.calls_replayed, done.n_turns) == (1, 4)
    assert story.rows("SELECT * FROM journals WHERE position('hunter2'::bytea in body) > 0") == []


def test_a_journal_whose_object_is_gone_is_left_out_with_a_warning(
    story: StoredRun,
    make_worker: MakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([turn(0), ModelTransportError("Away.", code="http_503"), *map(turn, range(4))])
    worker = make_worker(lambda: next(answers), **EVERY)
    worker.work(story)
    story.rows("SELECT 1")
    with story.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE journals SET body_bytes = 1000000")
    put = FolderPayloads.put

    def put_and_lose(self: FolderPayloads, key: str, data: bytes) -> str:
        uri = put(self, key, data)
        Path(unquote(urlsplit(uri).path)).unlink()
        return uri

    monkeypatch.setattr(FolderPayloads, "put", put_and_lose)
    (done,) = worker.work(story)
    assert (done.outcome, done.calls_replayed) == ("succeeded", 0)
    assert "starts afresh, without its journal" in caplog.text


def test_a_full_journal_takes_no_more(story: StoredRun, make_worker: MakeWorker) -> None:
    answers = one_by_one(fails_at=3)
    worker = make_worker(lambda: next(answers), journal={"after_s": 0, "max_bytes": 700})
    _, done = worker.work_off(story)
    assert 0 < done.calls_replayed < 3


def test_what_was_replayed_is_shown(story: StoredRun, make_worker: MakeWorker) -> None:
    answers = one_by_one(fails_at=2)
    make_worker(lambda: next(answers), **EVERY).work_off(story)
    with story.engine.connect() as connection:
        found = read_rollout(connection, story.rollouts()[0]["rollout_id"])
        status = run_status(connection, get_run(connection, story.run.slug))
    first, second = found["attempts"]
    assert (first["calls_replayed"], second["calls_replayed"]) == (0, 2)
    assert second["replayed_from"] == [1]
    tokens = status.to_json()["tokens"]
    assert tokens["saved"] == 12 + 24
