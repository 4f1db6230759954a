"""The bare loops, the baselines of the pipeline: asyncio and one shared client, no storage.

B1 is `AsyncOpenAI` on its aiohttp transport, B2 raw aiohttp with orjson. B3 is B2 that also keeps
the token ids and logprobs of each rollout's last answer. All are on uvloop. Each runs in its own
process (`python -m benchmarks.bare_loop`), which `benchmarks.subjects` starts. Must not: import the
product, or do work that a rollout does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Protocol

import uvloop

from benchmarks.workloads import WORKLOADS, Workload, label

_ACTION = re.compile(r"Action: calculator\(expression='(\d+) ([-+*]) (\d+)'\)")
_FINAL = "Final Answer: "
_SPARE_CALLS = 7
_SYSTEM = """Answer the question step by step. You have one tool:

calculator(expression: str): the value of an arithmetic expression.

Reply with a line `Thought: ...` and then either a line
Action: calculator(expression='...')
and you will be told its result, or
Final Answer: ...
"""


@dataclass(slots=True)
class LoopResult:
    """The counts of one run of a bare loop, made by itself."""

    rollouts: int
    finished: int = 0
    wrong: int = 0
    failed: int = 0
    wall_s: float = 0.0


class ChatClient(Protocol):
    """One model call: messages in, text out."""

    async def complete(self, messages: list[dict[str, str]], user: str) -> str:
        """Return the answer's text; raises an error after the last retry."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class SdkClient:
    """The client of B1: one `AsyncOpenAI` on aiohttp, with the SDK's own retries."""

    def __init__(self, base_url: str, retries: int, _in_flight: int) -> None:
        # The transport's default limit of 1000 connections is kept.
        from openai import AsyncOpenAI, DefaultAioHttpClient

        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key="none",
            max_retries=retries,
            http_client=DefaultAioHttpClient(),
        )

    async def complete(self, messages: list[dict[str, str]], user: str) -> str:
        """Ask once."""
        messages_: Any = messages
        response = await self._client.chat.completions.create(
            model="mock", messages=messages_, temperature=0.7, max_tokens=512, user=user
        )
        return response.choices[0].message.content or ""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class RawClient:
    """The client of B2: aiohttp and orjson, with minimal retries."""

    def __init__(self, base_url: str, retries: int, in_flight: int) -> None:
        import aiohttp
        import orjson

        self._dumps, self._loads = orjson.dumps, orjson.loads
        self._url = f"{base_url}/chat/completions"
        self._retries = retries
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=in_flight),
            headers={"content-type": "application/json", "authorization": "Bearer none"},
        )

    async def complete(self, messages: list[dict[str, str]], user: str) -> str:
        """Repeat the call until it succeeds or the retries are used up."""
        body = self._dumps(
            {
                "model": "mock",
                "messages": messages,
                "temperature": 0.7,
                "max_tokens": 512,
                "user": user,
            }
        )
        for tries in range(self._retries + 1):
            async with self._session.post(self._url, data=body) as response:
                raw = await response.read()
                if response.status == 200:
                    return self._text(self._loads(raw), user)
                wait_s = response.headers.get("retry-after")
            # The SDK's own backoff, so that B1 and B2 differ only in the client.
            backoff_s = min(0.5 * 2**tries, 8) * (1 - 0.25 * random.random())
            if tries < self._retries:
                await asyncio.sleep(float(wait_s) if wait_s else backoff_s)
        raise RuntimeError(f"still status {response.status} after {self._retries} retries")

    def _text(self, answer: dict[str, Any], user: str) -> str:
        return answer["choices"][0]["message"]["content"]

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


class TokenClient(RawClient):
    """The client of B3: the last answer of a rollout holds the ids of all its calls."""

    def __init__(self, base_url: str, retries: int, in_flight: int) -> None:
        super().__init__(base_url, retries, in_flight)
        self._in_flight = in_flight
        self._kept: dict[str, tuple[Any, ...]] = {}

    def _text(self, answer: dict[str, Any], user: str) -> str:
        (choice,) = answer["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        self._kept.pop(user, None)
        self._kept[user] = (answer["prompt_token_ids"], choice["token_ids"], logprobs)
        if len(self._kept) > self._in_flight:
            del self._kept[next(iter(self._kept))]  # of a rollout that has ended
        return super()._text(answer, user)


CLIENTS = {"B1": SdkClient, "B2": RawClient, "B3": TokenClient}


async def solve(client: ChatClient, prompt: str, user: str, *, most_calls: int) -> str | None:
    """Run one rollout: call the model and calculate, until the final answer; None without one."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": prompt}]
    for _ in range(most_calls):
        text = await client.complete(messages, user)
        if (at := text.find(_FINAL)) >= 0:
            return text[at + len(_FINAL) :].strip()
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"Observation: {calculate(text)}"})
    return None


def calculate(text: str) -> str:
    """Return the result of the action in a model's text; the mock uses two integers only."""
    action = _ACTION.search(text)
    if action is None:
        return "no action found"
    left, right = int(action[1]), int(action[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[action[2]])


async def run_loop(client: ChatClient, workload: Workload, run: str) -> LoopResult:
    """Run all rollouts of a workload, `in_flight` at a time."""
    result = LoopResult(workload.rollouts)
    rows = enumerate(workload.rows())

    async def lane() -> None:
        for number, row in rows:
            try:
                answer = await solve(
                    client,
                    row["prompt"],
                    label(run, number),
                    most_calls=workload.behaviour.turns + _SPARE_CALLS,
                )
            except Exception as error:  # a failed rollout must not stop the others
                result.failed += 1
                print(f"{label(run, number)}: {error!r}", file=sys.stderr)
                continue
            result.finished += 1
            result.wrong += answer != row["answer"]

    started = monotonic()
    async with asyncio.TaskGroup() as lanes:
        for _ in range(min(workload.in_flight, workload.rollouts)):
            lanes.create_task(lane())
    result.wall_s = monotonic() - started
    return result


async def serve_one(name: str, base_url: str, workload: Workload, *, wait: bool) -> None:
    """Warm up, print that it is ready, wait for a line on stdin if asked, run, print the result."""
    client = CLIENTS[name](base_url, workload.client_retries, workload.in_flight)
    try:
        await run_loop(client, workload.resized(rollouts=20), "warm")
        if wait:
            print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                return  # the parent process has ended
        result = await run_loop(client, workload, f"{name}-{workload.name}".lower())
        print(json.dumps(asdict(result)), flush=True)
        if wait:
            # Wait before the exit, because an ended process cannot be measured.
            await asyncio.to_thread(sys.stdin.readline)
    finally:
        await client.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bare_loop", description="B1, B2 or B3 on one workload.")
    parser.add_argument("client", choices=sorted(CLIENTS))
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--rollouts", type=int)
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--wait", action="store_true", help="for a line on stdin: start, then end")
    options = parser.parse_args(argv)
    workload = WORKLOADS[options.workload].resized(
        rollouts=options.rollouts, in_flight=options.in_flight
    )
    uvloop.run(serve_one(options.client, options.base_url, workload, wait=options.wait))


if __name__ == "__main__":
    main()
