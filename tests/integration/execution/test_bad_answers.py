"""What models and their servers may answer: each answer has a code or is kept as it is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun
from outcomes import outcome
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.payloads import FolderPayloads
from pipeline.trainer.export import export_run

E = ErrorClass
WorkerMaker = Callable[..., ScriptedWorker]


@dataclass
class Answer:
    status: int = 200
    content_type: str = "application/json"
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def chat(content: Any) -> bytes:
    message = {"role": "assistant", "content": content}
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()


class _Endpoint(BaseHTTPRequestHandler):
    answer = Answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer: Answer = self.server.answer  # pyright: ignore[reportAttributeAccessIssue]
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            # As UTF-8: what is no Latin letter must not stop the test's own server.
            self._headers_buffer.append(f"{name}: {value}\r\n".encode())  # pyright: ignore[reportAttributeAccessIssue]
        self.end_headers()
        try:
            self.wfile.write(answer.body)
        except OSError:
            pass  # the client has read enough

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


BAD_ANSWERS = {
    "html": (Answer(200, "text/html", b"<html>Welcome</html>"), E.MODEL_BAD_REQUEST),
    "truncated": (Answer(body=chat("42")[:-9]), E.MODEL_BAD_REQUEST),
    "no choices": (Answer(body=b'{"choices": []}'), E.MODEL_BAD_REQUEST),
    "a list": (Answer(body=b"[]"), E.MODEL_BAD_REQUEST),
    "nothing": (Answer(body=b""), E.MODEL_BAD_REQUEST),
    "error inside": (Answer(body=b'{"error": {"message": "bad prompt"}}'), E.MODEL_BAD_REQUEST),
    "overload inside": (
        Answer(body=b'{"error": {"message": "server overloaded", "code": 503}}'),
        E.MODEL_TRANSPORT,
    ),
    "50 MB": (Answer(body=chat("x" * 50_000_000)), E.MODEL_BAD_REQUEST),
    "html of a proxy": (Answer(502, "text/html", b"<h1>Bad Gateway</h1>"), E.MODEL_TRANSPORT),
    "no such model": (Answer(404, body=b'{"error": {"message": "no model"}}'), E.MODEL_BAD_REQUEST),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
@pytest.mark.parametrize("client", ["lean", "sdk"])
def test_an_answer_that_is_no_completion_has_a_class_and_is_no_sample(
    engine, make_worker, endpoint, name, client
):
    endpoint.answer, error_class = BAD_ANSWERS[name]
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    worker = make_worker(llm={"base_url": url, "client": client, "max_retries": 0})
    story = StoredRun(engine, max_attempts=1)
    state, reward, found, code = outcome(story, worker)
    assert (state, reward, found) == ("failed", None, error_class)
    assert code
    (attempt,) = story.rows("SELECT * FROM attempts")
    assert len(attempt["error_message"]) <= 2000
    assert url in attempt["error_message"]


@pytest.mark.parametrize("asked", ["1e300", "99999999999", "-5", "nan", "soon", "\u0663"])
@pytest.mark.parametrize("client", ["lean", "sdk"])
def test_no_server_can_make_us_wait_for_more_than_an_hour(
    engine, make_worker, endpoint, asked, client
):
    endpoint.answer = Answer(429, body=b"{}", headers={"Retry-After": asked})
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    story = StoredRun(engine)
    make_worker(llm={"base_url": url, "client": client, "max_retries": 0}).work(story)
    (rollout,) = story.rows(
        "SELECT *, extract(epoch FROM not_before - now()) AS wait_s FROM rollouts"
    )
    assert (rollout["state"], rollout["attempts_used"]) == ("queued", 0)
    assert rollout["wait_s"] <= 3600
    if asked in ("1e300", "99999999999"):
        assert rollout["wait_s"] > 3500


NASTY = {
    "NUL": "a\0b",
    "pair": "😀",
    "ANSI codes": "\x1b[31mred\x1b[0m\x07\r\x1b]0;title\x07",
    "right to left": "\u202eabc\u202c\ufeff",
    "huge number": "1" + "0" * 400,
}


@pytest.mark.parametrize("name", NASTY)
def test_what_a_model_writes_is_stored_and_exported_as_it_is(
    engine: Engine, make_worker: WorkerMaker, endpoint, tmp_path: Path, name: str
):
    text = NASTY[name]
    endpoint.answer = Answer(body=chat(text))
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    story = StoredRun(engine, reward="exact_match")
    state, reward, *_ = outcome(story, make_worker(llm={"base_url": url}))
    assert (state, reward) == ("succeeded", 0.0)
    payloads = FolderPayloads(tmp_path / "payloads")
    report = export_run(engine, story.run, tmp_path / "out.jsonl", to="jsonl", payloads=payloads)
    assert (report.rollouts, report.unreadable) == (1, 0)
    raw = (tmp_path / "out.jsonl").read_bytes()
    assert raw.count(b"\n") == 1, "one rollout a line, whatever stands in it"
    assert json.loads(raw)["messages"][-1]["content"] == text
    assert not set(raw) & set(b"\0\x1b\x07"), "a terminal is not driven by the file"


def test_a_lone_surrogate_of_a_server_is_a_replacement_character(engine, make_worker, endpoint):
    endpoint.answer = Answer(body=chat("1\ud83d"))
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    story = StoredRun(engine, reward="exact_match")
    assert outcome(story, make_worker(llm={"base_url": url}))[0] == "succeeded"
    (kept,) = story.rows("SELECT body FROM trajectories")
    assert unpack_record(kept["body"]).messages[-1]["content"] == "1\ufffd"
