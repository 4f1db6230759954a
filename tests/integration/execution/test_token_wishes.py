"""What a run says about tokens, against servers that know the fields and one that does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fixtures.stored_run import StoredRun

from pipeline.contract.rollout import RunPurpose
from pipeline.contract.run import RunConfig
from pipeline.contract.trajectory import unpack_record
from pipeline.settings import load_settings
from pipeline.tokens.token_body import unpack_tokens
from rollout.endpoint_checks import check_endpoints

IDS = {"prompt_token_ids": [1, 2]}
CHOICE = {"token_ids": [3], "logprobs": {"content": [{"token": "4", "logprob": -0.5}]}}
META = {"output_token_logprobs": [[-0.5, 3, None]]}


class Server(ThreadingHTTPServer):
    """Answers chats like vLLM, like SGLang, or without knowing the fields for token ids."""

    kind = "vllm"
    gives_ids = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send({"data": [{"id": "m"}]}, 200)
            return
        roots = {"vllm": "/version", "sglang": "/get_server_info"}
        found = roots.get(self.server.kind) == self.path
        self._send({"version": "1"} if found else {}, 200 if found else 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(asked)
        self.server.answers.wait(10)
        choice: dict[str, Any] = {"message": {"content": "42"}, "finish_reason": "stop"}
        body: dict[str, Any] = {"choices": [choice]}
        if asked.get("return_token_ids") and self.server.kind == "openai":
            self._send({"error": {"message": "unknown field return_token_ids"}}, 400)
            return
        if asked.get("return_token_ids") and self.server.gives_ids:
            if self.server.kind == "vllm":
                body |= IDS
                choice |= CHOICE
            else:
                choice |= IDS | {"meta_info": META}
        self._send(body, 200)

    def _send(self, body: Any, status: int) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


def work(engine: Any, make_worker: Any, server: Server, llm: Any = None, **config: Any) -> Any:
    story = StoredRun(engine, **config)
    llm = {"base_url": server.base_url, **(llm or {})}
    (completion,) = make_worker(llm=llm).work(story)
    return completion


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_ids_are_asked_for_in_the_words_of_the_server(engine, make_worker, server, kind):
    server.kind = kind
    completion = work(engine, make_worker, server, tokens="required")
    assert completion.outcome == "succeeded"
    (call,) = unpack_tokens(completion.tokens)
    assert call.prompt is not None
    assert call.completion is not None
    assert call.logprobs is not None
    assert (call.prompt.tolist(), call.completion.tolist()) == ([1, 2], [3])
    assert (call.logprobs.tolist(), call.trainable) == ([-0.5], True)
    assert server.bodies[0]["logprobs"] is True
    assert ("return_meta_info" in server.bodies[0]) == (kind == "sglang")


def test_a_plain_server_is_asked_for_nothing_and_its_text_is_kept(engine, make_worker, server):
    server.kind = "openai"
    completion = work(engine, make_worker, server)
    assert (completion.outcome, completion.tokens) == ("succeeded", b"")
    assert not {"return_token_ids", "logprobs"} & set(server.bodies[0])
    (call,) = unpack_record(completion.body).calls
    assert not call.trainable


def test_a_run_that_requires_ids_fails_a_call_without_them_and_says_the_remedy(
    engine, make_worker, server
):
    server.kind = "openai"
    completion = work(engine, make_worker, server, tokens="required")
    assert (completion.error.error_class, completion.error.code) == ("contract", "no_token_ids")
    assert server.base_url in completion.error.message
    for remedy in ("vLLM", "SGLang", "llm.server", "tokens=wanted"):
        assert remedy in completion.error.message
    # The text is kept, as for any other error.
    (call,) = unpack_record(completion.body).calls
    assert call.response == {"role": "assistant", "content": "42"}


def test_a_server_behind_a_proxy_is_named_by_a_setting(engine, make_worker, server):
    server.kind = "openai"  # what it looks like from here
    completion = work(engine, make_worker, server, {"server": "vllm"}, tokens="required")
    assert "unknown field return_token_ids" in completion.error.message
    server.kind = "vllm"
    completion = work(engine, make_worker, server, {"server": "openai"}, tokens="wanted")
    assert completion.tokens == b""
    assert "return_token_ids" not in server.bodies[-1]


def test_a_run_without_tokens_asks_for_none_and_keeps_none(engine, make_worker, server):
    assert work(engine, make_worker, server, tokens="off").tokens == b""
    assert "return_token_ids" not in server.bodies[0]


def told_by_doctor(tmp_path: Any, server: Server, llm: Any = None) -> tuple[str, str, str]:
    """Return status, detail and remedy of the doctor's check of token ids."""
    settings = load_settings(
        overrides={"llm": {"base_url": server.base_url, **(llm or {})}}, start=tmp_path
    )
    endpoint, tokens = check_endpoints(settings)
    assert (endpoint.name, endpoint.status, tokens.name) == ("model endpoint", "ok", "token ids")
    assert len(server.bodies) == 1, "the doctor makes one call"
    return tokens.status, tokens.detail, tokens.remedy


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_doctor_finds_ids_by_one_call_of_one_token(tmp_path, server, kind):
    server.kind = kind
    status, detail, remedy = told_by_doctor(tmp_path, server)
    assert (status, remedy) == ("ok", "")
    assert f"m returns ids and logprobs ({kind})" in detail
    assert server.bodies[0]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("kind", "gives_ids", "llm", "lack", "remedy"),
    [
        ("openai", True, {}, "no prompt ids", "behind a proxy, set ROLLOUT_LLM__SERVER=vllm"),
        ("vllm", True, {"server": "openai"}, "no prompt ids", "set ROLLOUT_LLM__SERVER=auto"),
        ("vllm", False, {}, "no completion ids", "vLLM returns ids from 0.10.2 on"),
        ("sglang", False, {"server": "vllm"}, "no logprobs", "Is ROLLOUT_LLM__SERVER=vllm right?"),
        ("openai", True, {"server": "vllm"}, "unknown field", "ROLLOUT_LLM__SERVER=vllm decides"),
    ],
)
def test_the_doctor_names_what_is_missing_and_the_setting(
    tmp_path, server, kind, gives_ids, llm, lack, remedy
):
    server.kind, server.gives_ids = kind, gives_ids
    status, detail, to_do = told_by_doctor(tmp_path, server, llm)
    assert status == "warning"
    assert lack in detail
    assert remedy in to_do


def test_the_doctor_does_not_wait_for_a_call_that_is_never_answered(tmp_path, server, monkeypatch):
    monkeypatch.setattr("rollout.endpoint_checks.CALL_S", 0.1)
    server.answers.clear()
    status, detail, _ = told_by_doctor(tmp_path, server)
    server.answers.set()
    assert status == "warning"
    assert "No answer came within 0.1 s" in detail


def test_several_replicas_are_asked_each_in_its_words(engine, make_worker, server):
    other = Server()
    other.kind = "sglang"
    threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}).start()
    story = StoredRun(
        engine, prompts=8, base_url=[server.base_url, other.base_url], tokens="required"
    )
    said = make_worker(
        llm={}, worker={"allowed_base_urls": [server.base_url, other.base_url]}
    ).work(story)
    other.shutdown()
    other.server_close()
    assert {completion.outcome for completion in said} == {"succeeded"}
    assert server.bodies
    assert other.bodies
    assert not any("return_meta_info" in body for body in server.bodies)
    assert all("return_meta_info" in body for body in other.bodies)


def test_a_training_run_wants_tokens_and_an_evaluation_does_not():
    assert RunConfig().tokens == "wanted"
    assert RunConfig(purpose=RunPurpose.EVAL).tokens == "off"
    assert RunConfig(purpose=RunPurpose.EVAL, tokens="required").tokens == "required"
    assert RunConfig.stored({"purpose": "eval"}).tokens == "off"
