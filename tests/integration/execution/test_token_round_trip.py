"""The rows that a trainer pulls are the tokens that a server sampled, token by token.

An agent makes calls whose ids the test chose; a server answers them like vLLM; worker, frame, store
and trainer client lie between the two.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from fixtures.stored_run import SOURCE, StoredRun

from pipeline.contract.train_batch import BatchSpec
from pipeline.store.engine import transact
from pipeline.store.prompts import add_prompts, seal_run
from pipeline.trainer.client import TrainerClient
from workers.core.registry import register_agent

#: Few enough for the suite; the full trial has 200.
ROLLOUTS = int(os.environ.get("TEST_ROUND_TRIPS", "40"))
MOST_CALLS = 30

Call = dict[str, Any]


class Vllm(BaseHTTPRequestHandler):
    """Returns the ids that the last message asks for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"version": "0.10.2"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        call = json.loads(asked["messages"][-1]["content"])
        content = [{"token": "", "logprob": value} for value in call["logprobs"]]
        choice = {
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": call["finish"],
            "token_ids": call["completion"],
            "logprobs": {"content": content},
        }
        metadata = {"weight_version": str(call["version"])}
        self._send({"choices": [choice], "prompt_token_ids": call["prompt"], "metadata": metadata})

    def _send(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def base_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def script(draw: random.Random) -> list[list[Call]]:
    """Return the calls of one rollout, in rounds; those of a round are made in parallel."""

    def ids(least: int = 1) -> list[int]:
        return [draw.randrange(150_000) for _ in range(draw.randint(least, 12))]

    # Of long answers only the new ids are parsed.
    contexts: dict[str, list[int]] = {"": ids(3) * draw.choice([1, 400])}
    rounds: list[list[Call]] = []
    for _ in range(draw.randint(1, MOST_CALLS)):
        agent = "critic" if draw.random() < 0.15 else ""
        context = contexts.setdefault(agent, ids(3))
        parallel: list[Call] = []
        for _ in range(draw.choice([1, 1, 1, 1, 3])):
            completion = ids()
            parallel.append(
                {
                    "agent": agent,
                    "prompt": context + (ids() if draw.random() < 0.3 else []),
                    "completion": completion,
                    "logprobs": [float(np.float32(-draw.random())) for _ in completion],
                    "finish": draw.choice(["stop", "stop", "tool_calls", "length"]),
                    "version": draw.randrange(9),
                }
            )
        rounds.append(parallel)
        last = parallel[-1]
        kind = draw.choice(["append"] * 6 + ["compaction", "thinking", "tokenised again"])
        if kind == "append":
            contexts[agent] = last["prompt"] + last["completion"] + ids()
        elif kind == "compaction":
            contexts[agent] = context[:2] + ids()
        elif kind == "thinking":
            contexts[agent] = last["prompt"] + last["completion"][-1:] + ids()
        else:
            contexts[agent] = last["prompt"] + last["completion"][:-1] + [150_001] + ids()
    return rounds


def test_the_rows_of_a_trainer_are_what_the_server_sampled(engine, make_worker, base_url):
    @register_agent("scripted")
    async def scripted(prompt: Any, llm: Any) -> str:
        for parallel in prompt["script"]:
            await asyncio.gather(
                *(
                    llm([{"role": "user", "content": json.dumps(call)}], agent=call["agent"])
                    for call in parallel
                )
            )
        return "1"

    draw = random.Random(14)
    scripts = [script(draw) for _ in range(ROLLOUTS)]
    story = StoredRun(engine, prompts=0, agent="scripted", n=1, n_min=1, tokens="required")
    prompts = [
        (number, {"content": "?", "answer": "1", "script": each})
        for number, each in enumerate(scripts)
    ]

    def enqueue(connection: Any) -> None:
        add_prompts(connection, story.run, SOURCE, prompts)
        seal_run(connection, story.run)

    transact(engine, enqueue)
    said = make_worker(llm={"base_url": base_url}).work_off(story)
    assert {completion.outcome for completion in said} == {"succeeded"}

    client = TrainerClient(engine, run=story.run.slug)
    batch = client.pull(0, BatchSpec(groups=ROLLOUTS, min_group_size=1, needs_logprobs=True))
    client.close()
    assert batch.rows_missing == 0
    for group in batch.groups:
        (rollout,) = group.rollouts
        calls = [call for parallel in group.prompt["script"] for call in parallel]
        rows = [row for row in batch.rows() if row.rollout_id == rollout.rollout_id]
        # Nothing but what was sampled is trained, and each token once.
        trained = Counter[int]()
        for row in rows:
            trained.update(row.token_ids[row.loss_mask == 1].tolist())
        assert trained == Counter(token for call in calls for token in call["completion"])
        for call in calls:
            found = [row for row in rows if is_trained_in(row, call)]
            assert len(found) == 1, "a call is trained in one row, after exactly its prompt"
        assert {row.reward for row in rows} == {1.0}
    origins = Counter(row.origin for row in batch.rows())
    assert origins.keys() == {"start", "branch", "drift", "rewrite"}
    assert any(row.truncated for row in batch.rows())


def is_trained_in(row: Any, call: Call) -> bool:
    start = len(call["prompt"])
    part = slice(start, start + len(call["completion"]))
    return (
        row.agent == call["agent"]
        and row.token_ids[:start].tolist() == call["prompt"]
        and row.token_ids[part].tolist() == call["completion"]
        and bool(row.loss_mask[part].all())
        and row.logprobs[part].tolist() == call["logprobs"]
        and set(row.versions[part].tolist()) == {call["version"]}
    )
