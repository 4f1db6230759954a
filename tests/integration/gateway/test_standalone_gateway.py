"""`rollout gateway`: a real process that answers for keys of its deployment, and records first."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.scripted_model import ScriptedModel, scripted_model
from fixtures.served_model import KEY
from fixtures.waiting import wait_until

from pipeline.agentcore.remote_calls import read_remote_calls
from pipeline.contract.messages import JournalFrame
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import OutcomeConsumer
from pipeline.queue.gateway_keys import GatewayKeys
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings
from pipeline.tokens.recorded_calls import RemoteCalls

SECRET = "of this deployment"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
REPEAT = {"x-stainless-retry-count": "1"}


@contextmanager
def running(folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Run the command; yields the process and its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout", "gateway", "--port", "0", "--json", "--while-stdin"],
        env={"PATH": "/usr/bin:/bin", "ROLLOUT_DATA_DIR": str(folder), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def key_of(model: str = "m-1", base_url: str | None = None, **changes: Any) -> str:
    expires_at = int(time.time()) + 60
    fields = {"model": model, "base_url": base_url, "expires_at": expires_at, **changes}
    return GatewayKeys(SECRET.encode()).write(KEY.model_copy(update=fields))


class Deployment:
    """Gateways over one broker, the model behind them, and the frames that they sent."""

    def __init__(self, settings: Settings, folder: Path, place: BrokerPlace) -> None:
        self.folder = folder
        self.environment = {
            "ROLLOUT_DATA_DIR": str(settings.data_dir),
            "ROLLOUT_BROKER__SIGNING_KEY": SECRET,
            "ROLLOUT_BROKER__URL": place.url,
            "ROLLOUT_BROKER__PREFIX": place.prefix,
            **{f"ROLLOUT_AWS__{name.upper()}": value for name, value in place.aws.items()},
        }
        self.stack = ExitStack()
        self.model: ScriptedModel
        self.frames: list[JournalFrame] = []
        self.payloads: PayloadStore = open_payloads(settings)
        self._consumer = OutcomeConsumer(broker_of(settings))

    def serve(self, policy: Callable[[Any], Any]) -> None:
        self.model = self.stack.enter_context(scripted_model(policy))
        self.environment["OPENAI_BASE_URL"] = self.model.base_url

    def gateway(self, **environment: str) -> tuple[subprocess.Popen[str], str]:
        process, ready = self.stack.enter_context(
            running(self.folder, **(self.environment | environment))
        )
        return process, ready["base_url"]

    def receive(self) -> int:
        """Take in the frames that the broker has; return the number of all."""
        while (found := self._consumer.receive(most=100, linger_s=0.0, timeout_s=0.5)).messages:
            self.frames += found.journal
            self._consumer.ack(found)
        return len(self.frames)

    def calls(self) -> RemoteCalls:
        self.receive()
        return read_remote_calls(self.frames, self.payloads)

    def texts(self) -> list[str]:
        return [str((call.response or {}).get("content")) for call in self.calls().calls]

    def close(self) -> None:
        self.stack.close()
        self._consumer.close()


@pytest.fixture
def deploy(
    tmp_path: Path, make_settings: Callable[..., Settings]
) -> Iterator[Callable[[BrokerPlace], Deployment]]:
    made: list[Deployment] = []

    def make(place: BrokerPlace) -> Deployment:
        settings = make_settings(place, broker={"signing_key": SECRET})
        made.append(Deployment(settings, tmp_path, place))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


@pytest.fixture
def deployed(deploy: Callable[[BrokerPlace], Deployment], redis_place: BrokerPlace) -> Deployment:
    return deploy(redis_place)


def ask(base_url: str, key: str, *, model: str = "m-1", **options: Any) -> str | None:
    import openai

    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(model=model, messages=MESSAGES, **options)
    return answer.choices[0].message.content


def test_a_gateway_alone_answers_for_every_key_of_its_deployment(deployed: Deployment) -> None:
    import openai

    deployed.serve(lambda _: "42")
    process, base_url = deployed.gateway()
    assert ask(base_url, key_of("m-1")) == "42"
    with pytest.raises(openai.NotFoundError):
        ask(base_url, key_of("m-1"), model="m-2")
    with pytest.raises(openai.APIStatusError, match="may not call"):
        ask(base_url, key_of("m-1", "http://10.9.8.7/v1", rollout_id=uuid.uuid4()))
    with pytest.raises(openai.AuthenticationError):
        ask(base_url, key_of("m-1", expires_at=1))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_gateway_alone_does_not_start_without_a_signing_key(tmp_path: Path) -> None:
    with running(tmp_path) as (process, answer):
        assert process.wait(30) == 3
    assert "signing key" in answer["error"]["message"]
    assert not (tmp_path / "redis").exists()


def test_the_broker_has_the_record_of_a_call_before_the_agent_has_its_answer(
    # The broker's place comes first: its queues are deleted after the deployment is closed.
    broker_place: BrokerPlace,
    deploy: Callable[[BrokerPlace], Deployment],
) -> None:
    deployed = deploy(broker_place)
    deployed.serve(lambda _: "one of rpk-key.0a")
    _, base_url = deployed.gateway()
    assert ask(base_url, key_of()) == "one of rpk-key.0a"
    assert deployed.receive() == 1
    (frame,) = deployed.frames
    assert frame.key == (KEY.rollout_id, KEY.attempt_no)
    assert deployed.texts() == ["one of ***"], "the record has no key"


def test_without_the_broker_no_call_is_answered(deployed: Deployment) -> None:
    import openai

    deployed.serve(lambda _: "42")
    limits = deployed.environment["ROLLOUT_BROKER__URL"]
    environment = {"ROLLOUT_BROKER__URL": "redis://127.0.0.1:1/0"}
    process, base_url = deployed.gateway(**environment, ROLLOUT_LIMITS__REDIS_URL=limits)
    with pytest.raises(openai.APITimeoutError):
        ask(base_url, key_of(), timeout=2)
    assert deployed.model.requests == 1
    process.kill()


def test_a_gateway_that_stops_without_the_broker_refuses_the_calls_that_it_cannot_record(
    deployed: Deployment,
) -> None:
    import openai

    deployed.serve(lambda _: "42")
    limits = deployed.environment["ROLLOUT_BROKER__URL"]
    environment = {"ROLLOUT_BROKER__URL": "redis://127.0.0.1:1/0"}
    process, base_url = deployed.gateway(**environment, ROLLOUT_LIMITS__REDIS_URL=limits)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(ask, base_url, key_of(), timeout=60)
        wait_until(lambda: deployed.model.requests == 1, 30, what="the model's answer")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError) as refused:
            call.result()
    assert (refused.value.status_code, refused.value.code) == (503, "not_recorded")
    assert refused.value.response.headers["x-should-retry"] == "true"
    assert process.wait(30) == 0


def test_a_call_whose_answer_was_lost_with_its_gateway_is_in_the_trajectory_once(
    deployed: Deployment,
) -> None:
    answers = iter(("one", "lost", "three", "four"))
    deployed.serve(lambda _: next(answers))
    first, base_url = deployed.gateway()
    key = key_of()
    ask(base_url, key, seed=1)
    ask(base_url, key, seed=2)  # as if its agent had not got it
    first.kill()
    _, base_url = deployed.gateway()
    assert ask(base_url, key, seed=2, extra_headers=REPEAT) == "three"
    assert ask(base_url, key, seed=2, extra_headers=REPEAT) == "three", "from its own memory"
    assert ask(base_url, key, seed=2) == "four", "another call"
    assert deployed.texts() == ["one", "three", "four"]
    assert deployed.calls().unanswered == 1


def test_an_idempotency_key_tells_that_an_answer_was_lost(deployed: Deployment) -> None:
    answers = iter(("lost", "two"))
    deployed.serve(lambda _: next(answers))
    key, named = key_of(), {"idempotency-key": "k1"}
    for _ in range(2):
        process, base_url = deployed.gateway()
        ask(base_url, key, extra_headers=named)
        process.kill()
    assert deployed.texts() == ["two"]


def test_a_gateway_that_knows_a_later_attempt_refuses_the_earlier_one(deployed: Deployment) -> None:
    import openai

    deployed.serve(lambda _: "42")
    _, base_url = deployed.gateway()
    ask(base_url, key_of())
    ask(base_url, key_of(attempt_no=2))
    with pytest.raises(openai.ConflictError, match="has ended or was given up"):
        ask(base_url, key_of())
    assert deployed.model.requests == 2


def test_large_records_go_through_the_payload_store(deployed: Deployment) -> None:
    deployed.serve(lambda _: "".join(chr(0x4E00 + i * 7919 % 20000) for i in range(1000)))
    _, base_url = deployed.gateway(ROLLOUT_PAYLOADS__INLINE_MAX_BYTES="100")
    told = ask(base_url, key_of())
    assert deployed.texts() == [told]
    assert deployed.frames[0].body == b""
