"""The rate of calls, held by three processes together and counted by the local runtime."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from fixtures.agentcore_runtime import ARN, Quotas, local_runtime

#: Without boto3's own set-up: this app only has to load.
EMPTY_APP = """
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
@app.entrypoint
def answer(payload):
    return {"status": "processing"}
"""

CALLER = """
import asyncio, sys
from pipeline.agentcore.call_pace import CallPace
from pipeline.agentcore.data_plane import DataPlane, SessionMissing
from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.limits.pool import LimiterPool

redis_url, prefix, arn, number, name = sys.argv[1:]
target = AgentCoreTarget(target=arn, results_bucket="b")


async def main():
    pool = LimiterPool(redis_url, prefix=prefix)
    pace, plane = CallPace(pool, 25), DataPlane()

    await plane.prepare(target)

    async def call(i):
        await pace.wait(target, run="r")
        if i == 0:
            await plane.invoke(target, f"{name}-{i:040d}", {})
            return
        try:
            await plane.stop(target, f"{name}-{i:040d}")
        except SessionMissing:
            pass

    await asyncio.gather(*(call(i) for i in range(int(number))))
    await plane.close()
    await pool.close()

asyncio.run(main())
"""


def test_three_processes_keep_25_calls_per_second_stops_included(redis_url, tmp_path):
    environment = {
        "AWS_ACCESS_KEY_ID": "t",
        "AWS_SECRET_ACCESS_KEY": "t",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    # The pace is measured here. A quota as low would refuse what a busy machine delivers late.
    quotas = Quotas(requests_per_second=1000, max_sessions=3)
    with local_runtime(EMPTY_APP, tmp_path, environment={}, quotas=quotas) as running:
        environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        began = time.monotonic()
        callers = [
            subprocess.Popen(
                [sys.executable, "-c", CALLER, redis_url, tmp_path.name, ARN, "50", f"caller{i}"],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(3)
        ]
        for caller in callers:
            _, errors = caller.communicate(timeout=60)
            assert caller.returncode == 0, errors
        seconds = time.monotonic() - began
        figures = running.figures()
        assert figures["invocations"] + figures["stops"] == 150
        assert seconds >= 149 / 25
        assert figures["most_per_second"] >= 15
        assert figures.get("throttled", 0) == 0
        with pytest.raises(ClientError) as raised:
            running.invoke({}, "one-too-many-" + "x" * 30)
        assert raised.value.response["Error"]["Code"] == "ServiceQuotaExceededException"
