import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class FakeEndpoint:
    """Answers OpenAI and Anthropic requests with one text; keeps what it was asked."""

    url: str
    answer: str = "Final Answer: from the endpoint"
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def reply_to(self, path: str) -> dict[str, Any]:
        if path.endswith("/messages"):
            return {
                "id": "m1",
                "type": "message",
                "role": "assistant",
                "model": "fake",
                "content": [{"type": "text", "text": self.answer}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 3, "output_tokens": 2},
            }
        message = {"role": "assistant", "content": self.answer}
        return {
            "id": "c1",
            "object": "chat.completion",
            "created": 0,
            "model": "fake",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            fake.paths.append(self.path)
            fake.bodies.append(json.loads(raw))
            key = self.headers.get("x-api-key") or self.headers.get("Authorization") or ""
            fake.keys.append(key.removeprefix("Bearer "))
            body = json.dumps(fake.reply_to(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            # One of the snippets never closes its client, whose connection would stay open.
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake = FakeEndpoint(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _no_library_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTIC_LOG_LEVEL", "AGENTIC_SAVE_TRAJECTORIES"):
        monkeypatch.delenv(name, raising=False)
