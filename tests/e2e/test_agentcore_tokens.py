"""Remote agents whose model calls go through a gateway of its own: their calls have token ids."""

from __future__ import annotations

import json
import signal
import socket
from collections import Counter
from typing import Any

from fixtures.agentcore_cli import buckets, dataset, rollout
from fixtures.agentcore_runtime import ARN, local_runtime, serving
from fixtures.command_line import COMMAND_S
from fixtures.waiting import wait_until
from sqlalchemy import text

from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import unpack_record
from pipeline.store.engine import open_engine
from pipeline.tokens.token_body import unpack_tokens
from pipeline.trainer.client import TrainerClient
from workers.offline_policy.policy import OfflinePolicy, OfflinePolicyOptions

__all__ = ["buckets", "rollout"]

#: A GSM8K-like agent of Strands; its client waits for a gateway that starts again.
APP = """
from strands import Agent, tool
from workers.agentcore import StrandsAgentCoreRLApp, StrandsRolloutCollector

app = StrandsAgentCoreRLApp()
model = app.create_openai_compatible_model(client_args={"max_retries": 10})


@tool
def calculator(expression: str) -> str:
    '''Compute an expression.'''
    return str(eval(expression))


@app.rollout_entrypoint
async def solve(payload):
    collector = StrandsRolloutCollector()
    agent = Agent(model=model, tools=[calculator], hooks=[collector], callback_handler=None,
                  system_prompt='Write the answer after "####".')
    response = await agent.invoke_async(payload["prompt"])
    said = "".join(part.get("text", "") for part in response.message["content"])
    return {"rollout_data": collector.get_rollout_data(),
            "rewards": float(said.rstrip().endswith(payload["answer"]))}


if __name__ == "__main__":
    app.run()
"""
ROWS = [{"question": f"What is {i} * {i + 3}?", "answer": str(i * (i + 3))} for i in range(2, 6)]


class WatchedPolicy:
    """The offline policy, and the ids of each answer as they left it."""

    def __init__(self, **options):
        self._policy = OfflinePolicy.from_options(OfflinePolicyOptions(**options))
        self.sampled = []

    async def __call__(self, scope, receive, send):
        body = b""

        async def watch(message):
            nonlocal body
            body += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body"):
                answer = json.loads(body)
                if "prompt_token_ids" in answer:
                    ids = answer["choices"][0]["token_ids"]
                    self.sampled.append((tuple(answer["prompt_token_ids"]), tuple(ids)))
            await send(message)

        if scope["type"] == "http":
            return await self._policy(scope, receive, watch)
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": message["type"] + ".complete"})
        await send({"type": "lifespan.shutdown.complete"})


def stored_calls(environment, run) -> list[tuple[Any, list[Any]]]:
    """Return the record and the sampled calls of each trajectory of a run."""
    query = text(
        "SELECT t.body, t.tokens FROM trajectories t JOIN rollouts r USING (rollout_id)"
        " JOIN runs ON runs.run_id = r.run_id"
        " WHERE runs.slug = :run AND t.attempt_no = r.winner_attempt_no"
    )
    engine = open_engine(environment["ROLLOUT_DATABASE__URL"])
    with engine.connect() as connection:
        rows = connection.execute(query, {"run": run}).all()
    engine.dispose()
    return [(unpack_record(bytes(row.body)), unpack_tokens(bytes(row.tokens))) for row in rows]


def test_each_call_of_a_remote_agent_is_stored_once_with_the_ids_that_were_sampled(
    buckets, rollout, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    policy = WatchedPolicy(latency_ms=300, policy_version=4)
    rollout.environment |= {
        "ROLLOUT_BROKER__SIGNING_KEY": "of this deployment",
        "ROLLOUT_AGENTCORE__GATEWAY_URL": f"http://127.0.0.1:{port}/v1",
        "ROLLOUT_AGENTCORE__MAX_SESSIONS": "4",
        "ROLLOUT_LEASE__GRACE_S": "1",
    }
    with (
        serving(policy) as model,
        local_runtime(APP, tmp_path, environment=buckets.environment) as running,
    ):
        rollout.environment["OPENAI_BASE_URL"] = f"{model}/v1"
        rollout.environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        first = rollout.start("gateway", "--port", str(port), "--json")
        first.ready()
        run = rollout.start(
            "run", dataset(tmp_path, ROWS), "--run", "math", "-n", "2",
            "--executor", "agentcore", "--target", ARN, "--reward", "gsm8k", "--json",
        )  # fmt: skip
        wait_until(lambda: len(policy.sampled) >= 5, timeout_s=COMMAND_S)
        first.end(signal.SIGKILL)
        rollout.start("gateway", "--port", str(port), "--json").ready()
        done = run.end()
    assert done.code == 0, done.err
    assert done.document["rollouts"]["succeeded"] == 8, done.err

    sampled = Counter(policy.sampled)
    stored = stored_calls(rollout.environment, "math")
    for record, calls in stored:
        said = [message for message in record.messages if message["role"] == "assistant"]
        assert len(calls) == len(record.calls) == len(said) >= 2
        sampled.subtract((tuple(c.prompt.tolist()), tuple(c.completion.tolist())) for c in calls)
        assert all(len(call.logprobs) == len(call.completion) for call in calls)
        assert {call.version for call in calls} == {4}
    assert min(sampled.values()) == 0, "a stored call was not sampled, or is stored twice"
    engine = open_engine(rollout.environment["ROLLOUT_DATABASE__URL"])
    rows = TrainerClient(engine, run="math").pull(0, BatchSpec(groups=4)).rows()
    engine.dispose()
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    assert trained == sum(len(call.completion) for _, calls in stored for call in calls)
    shown = rollout("show", "rollout", "math-g000000-r0", "--tokens")
    assert "-0." in shown.out, "logprobs"
