"""An OpenAI-compatible server for the tiny policy, with the fields that vLLM adds for trainers.

    cd examples; python -m tiny_policy.server CHECKPOINT

Answers carry token ids, logprobs and the policy version. All requests that wait are answered in one
batch. `POST /weights` replaces the weights between two batches, so no completion mixes versions.
The first line on stdout is a JSON object with the base URL.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollout.signals import end_with_stdin
from tiny_policy.chat import END, decode, render
from tiny_policy.checkpoint import Checkpoint
from tiny_policy.generation import Sample, generate
from tiny_policy.model import Transformer

MODEL = "tiny-policy"


class PolicyServer:
    """The weights, and the requests that wait for the next batch."""

    def __init__(self, checkpoint: Path) -> None:
        self._waiting: list[tuple[Sample, asyncio.Future[int]]] = []
        self._has_work = asyncio.Event()
        self._load(checkpoint)

    async def batches(self) -> None:
        """Complete all waiting requests together, again and again; the batch runs in a thread."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            batch, self._waiting = self._waiting, []
            version = self._version
            await asyncio.to_thread(generate, self._model, [sample for sample, _ in batch])
            for _, done in batch:
                if not done.done():  # its client may have left
                    done.set_result(version)

    async def chat(self, request: Request) -> JSONResponse:
        """Answer `POST /v1/chat/completions`."""
        body = await request.json()
        try:
            sample = self._sample(body)
        except ValueError as error:
            return _error(str(error))
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, done))
        self._has_work.set()
        return JSONResponse(_completion(sample, version=await done))

    async def weights(self, request: Request) -> JSONResponse:
        """Answer `POST /weights {"path": …}`: the next batch is sampled from these weights."""
        self._load(Path((await request.json())["path"]))
        return JSONResponse({"version": self._version})

    async def models(self, _: Request) -> JSONResponse:
        """Answer `GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def _load(self, path: Path) -> None:
        checkpoint = Checkpoint.load(path)
        # A new object: a batch under way keeps the one it began with.
        self._model, self._version = Transformer(checkpoint.parameters), checkpoint.version

    def _sample(self, body: Mapping[str, Any]) -> Sample:
        prompt = render(body["messages"])
        max_tokens = int(body.get("max_tokens") or 8)
        positions = self._model.shape.positions
        if max_tokens < 1 or len(prompt) + max_tokens > positions:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens do not fit into {positions}")
        temperature = body.get("temperature")
        seed = body.get("seed")
        # A seed gives each prompt and version random numbers of its own, in any order of requests.
        entropy = None if seed is None else [int(seed), self._version, *prompt]
        return Sample(
            prompt,
            max_tokens,
            1.0 if temperature is None else float(temperature),
            np.random.default_rng(entropy),
        )


def _completion(sample: Sample, *, version: int) -> dict[str, Any]:
    has_end = sample.tokens[-1] == END
    text = decode(sample.tokens[:-1] if has_end else sample.tokens)
    logprobs = [
        {"token": decode([token]), "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(sample.tokens, sample.logprobs, strict=True)
    ]
    counts = {"prompt_tokens": len(sample.prompt), "completion_tokens": len(sample.tokens)}
    return {
        "id": f"chatcmpl-{time.monotonic_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "prompt_token_ids": sample.prompt,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop" if has_end else "length",
                "logprobs": {"content": logprobs},
                "token_ids": sample.tokens,
            }
        ],
        "usage": counts | {"total_tokens": sum(counts.values())},
        "metadata": {"weight_version": str(version)},
    }


def _error(message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": "bad_request"}
    return JSONResponse({"error": error}, status_code=400)


async def serve(checkpoint: Path) -> None:
    """Serve on a free port of loopback until SIGTERM."""
    policy = PolicyServer(checkpoint)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", policy.chat, methods=["POST"]),
            Route("/v1/models", policy.models),
            Route("/weights", policy.weights, methods=["POST"]),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(json.dumps({"base_url": f"http://127.0.0.1:{listener.getsockname()[1]}/v1"}), flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    batches = asyncio.create_task(policy.batches())
    await server.serve(sockets=[listener])
    batches.cancel()


if __name__ == "__main__":
    end_with_stdin()
    asyncio.run(serve(Path(sys.argv[1])))
