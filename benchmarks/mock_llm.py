"""A mock of an OpenAI-compatible LLM server, fast enough never to be the bottleneck.

The server is a process (`python -m benchmarks.mock_llm`), which `benchmarks.mock_server` starts for
benchmarks and the fault campaign. The paths are `/v1/chat/completions`, `/v1/models`, `/stats`,
`/reset` and `/disturb`. The HTTP/1.1 protocol is written by hand on uvloop; a request body is
scanned, never decoded. Must not: import the product.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
from time import monotonic
from typing import cast

import uvloop

from benchmarks.faults.histories import FOLDER_VARIABLE, History
from benchmarks.mock_answers import (
    asks_for_stream,
    http_response,
    read_identity,
    without_attempt,
)
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_calls import Call, MockLLM

#: The name of its history in the fault campaign.
ACTOR = "model"
_MAX_HEAD_BYTES = 64 * 1024
_MAX_BODY_BYTES = 64 * 1024 * 1024


class MockConnection(asyncio.Protocol):
    """One keep-alive connection; a pipelined request waits until the one before is answered."""

    def __init__(self, mock: MockLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._mock = mock
        self._loop = loop
        self._buffer = b""
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        """Serve the complete requests in the buffer."""
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer and self._call is None and self._serve_one():
            pass

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a call whose client went away."""
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._call.ledger.abandon()
            self._call = None

    def _serve_one(self) -> bool:
        """Serve one request from the buffer; False if the request is incomplete."""
        data = self._buffer
        head_end = data.find(b"\r\n\r\n")
        if head_end < 0:
            if len(data) > _MAX_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large")
            return False
        head = data[:head_end].lower()
        if b"\r\ntransfer-encoding:" in head:
            return self._refuse("411 Length Required")
        length = int(_header(head, data, b"content-length") or 0)
        if length > _MAX_BODY_BYTES:
            return self._refuse("413 Content Too Large")
        end = head_end + 4 + length
        if len(data) < end:
            return False
        self._buffer = data[end:]
        self._answer(head, data, data[head_end + 4 : end])
        return True

    def _answer(self, head: bytes, data: bytes, body: bytes) -> None:
        method, target, _ = data[: head.find(b"\r\n")].split(b" ", 2)
        if not target.endswith(b"/chat/completions"):
            self._transport.write(self._mock.control(method, target.decode("latin-1"), body))
        elif asks_for_stream(body):
            self._refuse("400 Bad Request")
        else:
            named = _header(head, data, b"x-rollout-id")
            identity = without_attempt(named) if named else read_identity(body)
            self._open(self._mock.open_call(identity, body, monotonic()))

    def _open(self, call: Call) -> None:
        self._call = call
        delay_s = call.due_at - monotonic()
        if delay_s <= 0:
            self._finish(call)
        else:
            self._timer = self._loop.call_later(delay_s, self._finish_waiting, call)

    def _finish(self, call: Call) -> None:
        self._call = None
        self._transport.write(call.response)
        call.ledger.end(call.identity, call.turn, call.status)

    def _finish_waiting(self, call: Call) -> None:
        self._timer = None
        self._finish(call)
        if self._buffer:
            self.data_received(b"")

    def _refuse(self, status: str) -> bool:
        """Answer with an error and close the connection; no further request is served."""
        error = {"message": f"the mock does not serve this: {status}"}
        self._transport.write(http_response(status, {"error": error}, "connection: close"))
        self._transport.close()
        self._buffer = b""
        return False


def _header(lowered_head: bytes, data: bytes, name: bytes) -> str | None:
    """Return a header's value in its original case; `lowered_head` is used for the search."""
    start = lowered_head.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = lowered_head.find(b"\r\n", start)
    return data[start : end if end >= 0 else len(lowered_head)].strip().decode("latin-1")


async def serve(mock: MockLLM) -> None:
    """Serve on a free port of the loopback until SIGTERM, SIGINT or the end of stdin."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signal_no in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_no, stop.set)
    server = await loop.create_server(
        lambda: MockConnection(mock, loop), "127.0.0.1", 0, backlog=4096
    )
    bound = server.sockets[0].getsockname()[1]
    ready = {"ready": True, "pid": os.getpid(), "port": bound}
    print(json.dumps({**ready, "base_url": f"http://127.0.0.1:{bound}/v1"}), flush=True)
    # If the benchmark is killed, its end of the pipe closes, and the server stops.
    loop.add_reader(sys.stdin.fileno(), lambda: os.read(0, 4096) or stop.set())
    await stop.wait()
    server.close()


def main() -> None:
    behaviour = MockBehaviour.from_json(json.loads(sys.argv[1]) if sys.argv[1:] else {})
    history = History.of_environment(ACTOR) if FOLDER_VARIABLE in os.environ else None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # rare, because a collection delays all calls in flight
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(MockLLM(behaviour, history)))


if __name__ == "__main__":
    main()
