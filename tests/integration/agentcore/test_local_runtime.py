"""The stand-in for AgentCore's data plane, spoken to by boto3's own client."""

from __future__ import annotations

import concurrent.futures
import time

import pytest
from botocore.exceptions import ClientError
from fixtures.agentcore_runtime import PLAIN_APP, Quotas, local_runtime, make_buckets, serving
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Route

from pipeline.agentcore.data_plane import DataPlane
from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.errors import ContractError
from pipeline.contract.result_keys import announced_results


@pytest.fixture
def buckets(aws_url):
    return make_buckets(aws_url)


def session(number: int) -> str:
    return f"session-{number:030d}"


def wait_until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def code_of(raised) -> str:
    return raised.value.response["Error"]["Code"]


def test_sessions_are_processes_that_publish_and_end(buckets, tmp_path):
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        training = {
            "exp_id": "exp",
            "input_id": "in",
            "session_id": session(1),
            "s3_bucket": buckets.bucket,
            "sqs_url": buckets.queue_url,
        }
        payload = {"prompt": "1+1?", "answer": "2", "_training": training}
        assert running.invoke(payload, session(1)) == {"status": "processing"}
        key = f"exp/in_{session(1)}.json"
        wait_until(lambda: buckets.keys() == [key])
        result = buckets.read(key)
        assert (result["status_code"], result["rewards"]) == (200, 1.0)
        found: list[str] = []
        wait_until(lambda: found.extend(buckets.receive()) or found)
        assert [r.key for r in announced_results(found[0])] == [key]

        # A second execution of the session leaves the good result as it is.
        first_etag = buckets.client("s3").head_object(Bucket=buckets.bucket, Key=key)["ETag"]
        running.invoke({**payload, "fails": "late"}, session(1))
        wait_until(lambda: buckets.receive())
        etag = buckets.client("s3").head_object(Bucket=buckets.bucket, Key=key)["ETag"]
        assert etag == first_etag

        assert running.figures()["live_sessions"] == 1
        running.stop(session(1))
        assert running.figures()["live_sessions"] == 0
        running.stop(session(1))
        with pytest.raises(ClientError) as raised:
            running.stop(session(2))
        assert code_of(raised) == "ResourceNotFoundException"


def test_a_good_result_takes_the_place_of_an_error(buckets, tmp_path):
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        rollout = {"exp_id": "e", "input_id": "i", "s3_bucket": buckets.bucket}
        answer = running.invoke({"prompt": "p", "fails": "first", "_rollout": rollout}, session(1))
        wait_until(buckets.keys)
        assert buckets.read(answer["result_key"])["status_code"] == 500
        running.invoke({"prompt": "p", "_rollout": rollout}, session(1))
        wait_until(lambda: buckets.read(answer["result_key"])["status_code"] == 200)


def test_quotas_and_errors_are_answered_as_the_service_does(buckets, tmp_path):
    quotas = Quotas(max_sessions=2)
    with local_runtime(
        PLAIN_APP, tmp_path, environment=buckets.environment, quotas=quotas
    ) as running:
        with pytest.raises(ClientError) as raised:
            running.client().invoke_agent_runtime(
                agentRuntimeArn="x", runtimeSessionId="s" * 33, payload=b"no json"
            )
        assert code_of(raised) == "RuntimeClientError"
        assert "Invalid JSON" in str(raised.value)
        running.stop("s" * 33)
        for number in (1, 2):
            running.invoke({}, session(number))
        with pytest.raises(ClientError) as raised:
            running.invoke({}, session(3))
        assert code_of(raised) == "ServiceQuotaExceededException"
        assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 402
        running.throttle(0.5)
        with pytest.raises(ClientError) as raised:
            running.invoke({}, session(1))
        assert code_of(raised) == "ThrottlingException"
        figures = running.figures()
        assert (figures["over_quota"], figures["throttled"]) == (1, 1)
        assert (figures["most_sessions"], figures["live_sessions"]) == (2, 2)


def test_calls_beyond_the_rate_are_throttled_stops_among_them(buckets, tmp_path):
    quotas = Quotas(requests_per_second=5)
    with local_runtime(
        PLAIN_APP, tmp_path, environment=buckets.environment, quotas=quotas
    ) as running:
        running.invoke({}, session(1))
        client = running.client()

        def stop(_):
            try:
                client.stop_runtime_session(agentRuntimeArn="x", runtimeSessionId=session(9))
            except ClientError as error:
                return error.response["Error"]["Code"]

        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            codes = list(threads.map(stop, range(10)))
        assert codes.count("ThrottlingException") >= 4
        assert running.figures()["most_per_second"] > 5


def test_idle_sessions_end_and_busy_ones_do_not(buckets, tmp_path):
    quotas = Quotas(idle_s=0.5)
    with local_runtime(
        PLAIN_APP, tmp_path, environment=buckets.environment, quotas=quotas
    ) as running:
        running.invoke({"prompt": "p", "wait_s": 2.0}, session(1))
        running.invoke({"prompt": "p"}, session(2))
        wait_until(lambda: running.figures()["live_sessions"] == 1)
        wait_until(lambda: running.figures()["live_sessions"] == 0)


async def test_a_container_that_redirects_is_not_followed():
    asked = []

    def elsewhere(request):
        asked.append(request.url.path)
        return RedirectResponse("/other/invocations", 307)

    routes = [Route("/{path:path}", elsewhere, methods=["POST"])]
    plane = DataPlane()
    with serving(Starlette(routes=routes)) as url:
        target = AgentCoreTarget(target=url, results_bucket="b")
        with pytest.raises(ContractError, match="HTTP 307"):
            await plane.invoke(target, session(1), {})
        await plane.close()
    assert asked == ["/invocations"]


def test_a_script_without_an_app_is_named(tmp_path):
    from workers.agentcore.session_processes import AppError, SessionProcesses

    async def load():
        await SessionProcesses(tmp_path / "none.py", {}).open()

    import asyncio

    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(AppError, match="makes no app"):
        asyncio.run(load())
