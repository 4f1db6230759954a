"""RolloutClient and BatchRunner against the local runtime, S3 and SQS."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest
from fixtures.agentcore_runtime import (
    ARN,
    PLAIN_APP,
    Quotas,
    local_runtime,
    make_buckets,
    set_environment,
)
from fixtures.waiting import wait_until

from workers.agentcore import BatchRunner, RolloutClient
from workers.agentcore.runtime_calls import InvocationError


@pytest.fixture(scope="module")
def place(aws_url, tmp_path_factory):
    """One runtime for all tests here; each has an experiment of its own."""
    buckets = make_buckets(aws_url)
    folder = tmp_path_factory.mktemp("app")
    quotas = Quotas(max_sessions=6)
    with (
        local_runtime(PLAIN_APP, folder, environment=buckets.environment, quotas=quotas) as running,
        set_environment(
            {
                **buckets.environment,
                "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": running.url,
                "AWS_DEFAULT_REGION": "us-west-2",
            }
        ),
    ):
        yield buckets, running


def client(place, exp_id, **options):
    return RolloutClient(ARN, place[0].bucket, exp_id, tps_limit=100, **options)


def test_a_future_gives_the_result_and_stops_its_session(place):
    future = client(place, "one").invoke({"prompt": "1+1?", "answer": "2"}, input_id="in")
    result = future.result(timeout=30)
    assert (result["status_code"], result["rewards"]) == (200, 1.0)
    assert future.result_key == f"one/in/{future.session_id}.json"
    assert future.done()
    assert future.elapsed() > 0
    assert place[1].figures()["live_sessions"] == 0


async def test_a_future_can_be_awaited(place):
    future = await client(place, "awaited").invoke_async({"prompt": "p", "fails": "broken"})
    result = await future
    assert (result["status_code"], result["stop_reason"]) == (500, "broken")


def test_a_cancelled_or_late_future_stops_its_session(place):
    many = client(place, "late")
    future = many.invoke({"prompt": "p", "wait_s": 60})
    assert not future.done()
    assert future.cancel()
    assert future.cancelled
    with pytest.raises(CancelledError):
        future.result()
    with pytest.raises(TimeoutError):
        many.invoke({"prompt": "p", "wait_s": 60}).result(timeout=0.5)
    assert place[1].figures()["live_sessions"] == 0


def test_a_batch_yields_every_payload_and_calls_errors_errors(place):
    payloads = [{"prompt": str(i), "reward": i} for i in range(6)]
    payloads[2]["fails"] = "on purpose"
    items = list(client(place, "batch").run_batch(payloads, 3, timeout=60))
    assert sorted(item.index for item in items) == list(range(6))
    failed = [item for item in items if not item.success]
    assert [(item.index, item.error) for item in failed] == [(2, "on purpose")]
    good = {item.index: item.result["rewards"] for item in items if item.success and item.result}
    assert good == {i: i for i in range(6) if i != 2}
    figures = place[1].figures()
    assert figures["live_sessions"] == 0


async def test_an_async_batch_goes_on_after_a_failing_poll_and_a_timeout(place):
    payloads = [{"prompt": "fast"}, {"prompt": "slow", "wait_s": 60}]
    many = client(place, "async")
    get, failures = many.s3_client.get_object, [True]

    def sometimes(**arguments):
        if failures:
            failures.pop()
            raise OSError("one poll fails")
        return get(**arguments)

    many.s3_client.get_object = sometimes
    items = [item async for item in many.run_batch_async(payloads, 2, timeout=8)]
    by_index = {item.index: item for item in sorted(items, key=lambda item: item.index)}
    assert by_index[0].success
    assert "Timeout after 8" in (by_index[1].error or "")
    for _ in range(100):
        if place[1].figures()["live_sessions"] == 0:
            break
        await asyncio.sleep(0.1)
    assert place[1].figures()["live_sessions"] == 0


def test_leaving_a_batch_stops_its_sessions(place):
    batch = client(place, "left").run_batch([{"prompt": "p"}] + [{"wait_s": 60}] * 3, 4)
    for item in batch:
        assert item.index == 0
        break
    assert place[1].figures()["live_sessions"] == 0


def test_an_agent_that_refuses_is_an_item_with_its_words(place):
    refused = client(place, "a/b", max_retry_attempts=1)
    items = list(refused.run_batch([{"prompt": "p"}], 1))
    assert "must not hold a '/'" in (items[0].error or "")
    with pytest.raises(InvocationError):
        refused.invoke({})


@pytest.mark.parametrize("style", ["training", "rollout", "both"])
def test_a_runner_reports_and_goes_on_where_it_ended(place, style):
    buckets, running = place

    def runner():
        return BatchRunner(
            ARN,
            s3_bucket=buckets.bucket,
            sqs_url=None if style == "rollout" else buckets.queue_url,
            exp_id=f"runner-{style}",
            payload_style=style,
            max_concurrent_sessions=4,
            tps_limit=100,
        )

    payloads = [{"prompt": str(i), "reward": float(i % 2)} for i in range(4)]
    inputs = ["a", "a", "b", "b"]
    first = runner()
    assert all(item.success for item in first.run(payloads, input_ids=inputs))
    report = first.report()
    assert (report.mean, report.pass_at) == (0.5, {1: 0.5, 2: 1.0})
    assert report.std_error == 0.0
    assert "reward 0.500" in str(report)
    before = running.figures()["sessions"]
    again = list(runner().run(payloads, input_ids=inputs))
    assert len(again) == 4
    assert running.figures()["sessions"] == before


def test_an_interrupted_runner_runs_only_what_has_no_good_result(place, tmp_path):
    buckets, running = place
    opened = tmp_path / "opened"
    payloads = [{"prompt": str(i), "reward": i} for i in range(5)]
    for payload in payloads[1:]:
        payload["wait_for"] = str(opened)

    def runner():
        return BatchRunner(
            ARN,
            s3_bucket=buckets.bucket,
            sqs_url=buckets.queue_url,
            exp_id="interrupted",
            max_concurrent_sessions=3,
            tps_limit=100,
        )

    for item in runner().run(payloads):
        assert item.index == 0
        break
    wait_until(lambda: running.figures()["live_sessions"] == 0, 20, seen=running.figures)
    before = running.figures()["sessions"]
    opened.touch()
    again = runner()
    items = sorted(again.run(payloads), key=lambda item: item.index)
    assert [item.result and item.result["rewards"] for item in items] == list(range(5))
    assert running.figures()["sessions"] == before + 4
    assert again.report().mean == 2.0


async def test_a_runner_is_asynchronous_too(place):
    runner = BatchRunner(ARN, s3_bucket=place[0].bucket, max_concurrent_sessions=2)
    items = [item async for item in runner.run_async([{"prompt": "a"}, {"prompt": "b"}])]
    assert [item.success for item in items] == [True, True]


def test_a_runner_names_what_is_missing():
    with pytest.raises(ValueError, match="s3_bucket"):
        BatchRunner(ARN)
    with pytest.raises(ValueError, match="sqs_url"):
        BatchRunner(ARN, s3_bucket="b", payload_style="training")
    with pytest.raises(ValueError, match="Neither"):
        BatchRunner("nowhere", s3_bucket="b")
