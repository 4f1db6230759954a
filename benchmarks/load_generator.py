"""The most calls per second that can be asked of the mock: a raw asyncio protocol, no HTTP library.

Own process (`python -m benchmarks.load_generator`), started by `benchmarks.capacity` to show that
the mock is not what limits a measured client. Must not: be compared with a client that decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.mock_answers import EXPRESSIONS
from benchmarks.workloads import QUESTION, label


@dataclass(slots=True)
class Load:
    """What one run of the generator reached."""

    calls: int
    wall_s: float
    calls_per_s: float


class LoadConnection(asyncio.Protocol):
    """One connection in a closed loop: the next request goes out when the answer is in."""

    def __init__(self, requests: Sequence[bytes], stop_at: float) -> None:
        self._requests = requests
        self._stop_at = stop_at
        self._buffer = b""
        self._transport: asyncio.Transport
        self.calls = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._requests[0])

    def data_received(self, data: bytes) -> None:
        """Send the next request once an answer is complete."""
        data = self._buffer = self._buffer + data if self._buffer else data
        head_end = data.find(b"\r\n\r\n")
        at = data.find(b"content-length: ") + len(b"content-length: ")
        if head_end < 0 or len(data) < head_end + 4 + int(data[at : data.find(b"\r", at)]):
            return
        self._buffer = b""
        self.calls += 1
        if monotonic() < self._stop_at:
            self._transport.write(self._requests[self.calls % len(self._requests)])
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the generator, with the reason if there is one."""
        if exc is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(exc)


def rollout_requests(host: str, number: int) -> list[bytes]:
    """The three requests of one rollout, as the bare loops send them."""
    messages = [{"role": "user", "content": f"{QUESTION} [row {number}]"}]
    requests: list[bytes] = []
    for turn in range(3):
        body = json.dumps({"model": "mock", "messages": messages, "user": label("load", number)})
        requests.append(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        action = f"Action: calculator(expression='{EXPRESSIONS[turn % len(EXPRESSIONS)]}')"
        messages.append({"role": "assistant", "content": f"Thought: I calculate.\n{action}"})
        messages.append({"role": "user", "content": "Observation: 391"})
    return requests


async def generate(base_url: str, connections: int, duration_s: float) -> Load:
    """Ask for `duration_s` over `connections` connections."""
    url = urlsplit(base_url)
    if url.hostname is None or url.port is None:
        raise ValueError(f"{base_url}: give a host and a port, as in http://127.0.0.1:8000/v1")
    loop = asyncio.get_running_loop()
    started = monotonic()
    protocols: list[LoadConnection] = []
    for number in range(connections):
        requests = rollout_requests(url.netloc, number)
        _, protocol = await loop.create_connection(
            lambda requests=requests: LoadConnection(requests, started + duration_s),
            url.hostname,
            url.port,
        )
        protocols.append(protocol)
    await asyncio.gather(*(protocol.closed for protocol in protocols))
    wall_s = monotonic() - started
    calls = sum(protocol.calls for protocol in protocols)
    return Load(calls, wall_s, calls / wall_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="load_generator", description="Load for the mock LLM.")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--duration-s", type=float, default=3.0)
    options = parser.parse_args(argv)
    load = uvloop.run(generate(options.base_url, options.connections, options.duration_s))
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main()
