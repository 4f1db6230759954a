"""`rollout gateway`: a real process that answers for keys of its deployment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fixtures.scripted_model import scripted_model
from fixtures.served_model import KEY

from pipeline.queue.gateway_keys import GatewayKeys

SECRET = "of this deployment"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


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


def key_of(model: str, base_url: str | None = None, **changes: Any) -> str:
    expires_at = int(time.time()) + 60
    fields = {"model": model, "base_url": base_url, "expires_at": expires_at, **changes}
    return GatewayKeys(SECRET.encode()).write(KEY.model_copy(update=fields))


def test_a_gateway_alone_answers_for_every_key_of_its_deployment(tmp_path):
    def ask(api_key: str, model: str = "m-1") -> str | None:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model=model, messages=MESSAGES)
        return answer.choices[0].message.content

    with scripted_model(lambda _: "42") as model:
        environment = {"ROLLOUT_BROKER__SIGNING_KEY": SECRET, "OPENAI_BASE_URL": model.base_url}
        with running(tmp_path, **environment) as (process, ready):
            base_url = ready["base_url"]
            assert ask(key_of("m-1")) == "42"
            with pytest.raises(openai.NotFoundError):
                ask(key_of("m-1"), "m-2")
            with pytest.raises(openai.APIStatusError, match="may not call"):
                ask(key_of("m-1", "http://10.9.8.7/v1"))
            with pytest.raises(openai.AuthenticationError):
                ask(key_of("m-1", expires_at=1))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_a_gateway_alone_does_not_start_without_a_signing_key(tmp_path):
    with running(tmp_path) as (process, answer):
        assert process.wait(30) == 3
    assert "signing key" in answer["error"]["message"]
