"""What a worker counts of its runs: bounded, without secrets, and logged a line now and then."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from typing import Any
from uuid import UUID

import pytest
from fixtures.messages import RUN_ID, request_of

from pipeline.contract.errors import ModelBadRequest, ModelRateLimit, ModelTransportError
from pipeline.contract.messages import Heartbeat
from pipeline.redaction import Redactor
from workers.llm.call_errors import HttpAnswer
from workers.llm.call_retries import CallRetries, CallRetryPolicy
from workers.llm.chat_client import ChatClient
from workers.process.activity import MOST_RUNS, Activity
from workers.process.attempt import Attempt
from workers.process.call_warnings import EVERY_S, CallWarnings

URL = "http://127.0.0.1:9/v1"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(
        CallWarnings("Each is tried again."), redactor=Redactor({"hunter2-key"}), clock=clock
    )


def refused() -> ModelTransportError:
    error = ModelTransportError(f"{URL}/chat/completions: no connection", code="connection")
    error.__cause__ = OSError(errno.ECONNREFUSED, "Connect call failed")
    return error


def attempt_with(tools: Any, **fields: Any) -> Attempt:
    attempt = Attempt(request_of(**fields), "w1")
    attempt.trajectory.metadata["tools"] = tools
    return attempt


def test_failed_tries_are_counted_by_endpoint_and_kind_in_all_and_in_the_last_minute(
    activity, clock
):
    watch = activity.watcher(RUN_ID, URL, "m")
    for error in (refused(), refused(), None, ModelRateLimit(f"{URL} answered 429: slow down.")):
        watch(error)
    clock.now += 45
    watch(refused())
    clock.now += 20
    (run,) = activity.snapshot()
    (calls,) = run.endpoints
    assert (calls.base_url, calls.model, calls.count, calls.last_minute) == (URL, "m", 5, 1)
    by_code = {failed.code: failed for failed in calls.failures}
    assert (by_code["connection"].count, by_code["connection"].last_minute) == (3, 1)
    assert by_code["connection"].message == "connection refused"
    assert (by_code["http_429"].count, by_code["http_429"].last_minute) == (1, 0)
    assert by_code["http_429"].message == "answered 429: slow down"


def test_secrets_and_what_cannot_be_stored_are_taken_out(activity):
    watch = activity.watcher(RUN_ID, "http://u:hunter2-key@host/v1", "m")
    watch(ModelTransportError("http://host answered 503: key hunter2-key\0", code="http_503"))
    (run,) = activity.snapshot()
    assert "hunter2-key" not in run.model_dump_json()
    assert "\0" not in run.endpoints[0].failures[0].message


def test_tool_calls_count_while_the_attempt_runs_and_once_when_it_has_ended(activity):
    counts = {"search": {"calls": 1, "errors": 1}}
    attempt = attempt_with(counts)

    def told() -> tuple[int, int]:
        (run,) = activity.snapshot()
        return run.tools["search"].count, run.tools["search"].errors

    with activity.counted(attempt):
        assert told() == told() == (1, 1)
        counts["search"] = {"calls": 3, "errors": 2}
        assert told() == (3, 2)
    assert told() == (3, 2)
    with activity.counted(attempt_with(counts, index=1)):
        assert told() == (6, 4)


def test_calls_that_could_not_be_read_are_counted_beside_the_tools(activity):
    attempt = attempt_with({"search": {"calls": 1, "errors": 0}})
    attempt.trajectory.metadata["lost_calls"] = 2
    with activity.counted(attempt):
        counted = activity.snapshot()[0].tools
    assert {name: (calls.count, calls.errors) for name, calls in counted.items()} == {
        "search": (1, 0),
        "(unreadable call)": (2, 2),
    }


@pytest.mark.parametrize(
    "tools", [None, [], {"t": 3}, {"t": {"calls": "x", "errors": 0}}, {3: {}}, {"t": {}}]
)
def test_whatever_an_agent_leaves_as_its_counts_harms_nobody(activity, tools):
    with activity.counted(attempt_with(tools)):
        assert activity.snapshot()[0].tools == {}


def test_a_heartbeat_stays_small_whatever_was_called(activity):
    tools = {f"{n}" * 500: {"calls": 1, "errors": 0} for n in range(99)}
    for number in range(3 * MOST_RUNS):
        run_id = UUID(int=number)
        for port in range(40):
            watch = activity.watcher(run_id, f"http://h:{port}/v1", "m")
            for status in range(40):
                watch(ModelTransportError("x" * 5000, code=f"http_{status}"))
        with activity.counted(attempt_with(tools, run_id=run_id)):
            pass
    told = activity.snapshot()
    assert [run.run_id.int for run in told] == list(range(2 * MOST_RUNS, 3 * MOST_RUNS))
    assert sum(calls.count for calls in told[0].endpoints) == 1600
    assert sum(calls.count for calls in told[0].tools.values()) == 99
    beat = Heartbeat(worker_id="w", sequence=1, activity=told)
    # SQS takes 256 KiB, and the attempts need room, too.
    assert len(beat.model_dump_json()) < 160 * 1024


def test_failing_calls_are_logged_at_once_and_then_a_line_now_and_then(activity, clock, caplog):
    caplog.set_level(logging.WARNING)
    watch = activity.watcher(RUN_ID, URL, "m")
    for _ in range(38):
        watch(refused())
    assert len(caplog.records) == 1
    assert "a call failed (connection refused). Each is tried again." in caplog.text
    clock.now += EVERY_S
    activity.snapshot()
    assert len(caplog.records) == 2
    assert f"Model server {URL}: 37 calls failed in the last 10 s" in caplog.text
    watch(ModelRateLimit("429"))
    assert len(caplog.records) == 3, "another kind is told at once"
    for _ in range(3):
        clock.now += EVERY_S
        activity.snapshot()
    assert len(caplog.records) == 3, "what does not fail any more is not told"


class Answering(ChatClient):
    """A client of an endpoint that answers with these statuses in turn."""

    def __init__(self, *statuses: int, **options: Any) -> None:
        async def no_wait(_: float) -> None:
            return None

        retries = CallRetries(CallRetryPolicy(), sleep=no_wait)
        super().__init__(URL, model="m", call_retries=retries, **options)
        self._statuses = list(statuses)

    async def _post(self, path: str, body: bytes, stream: Any) -> HttpAnswer:
        answer = b'{"choices": [{"message": {"content": "42"}}]}'
        return HttpAnswer(self._statuses.pop(0), {}, answer)


@pytest.mark.parametrize(
    ("statuses", "told"),
    [((503, 429, 200), ["http_503", "http_429", None]), ((400,), [None])],
    ids=["answered at last", "refused for good"],
)
def test_a_client_tells_each_try_as_it_ends(statuses, told):
    heard: list[str | None] = []
    client = Answering(*statuses, watch=lambda error: heard.append(error and error.code))
    with contextlib.suppress(ModelBadRequest):
        asyncio.run(client.generate([{"role": "user", "content": "6 * 7?"}]))
    assert heard == told
