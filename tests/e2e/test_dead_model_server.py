"""A model server that does not answer is seen within a few heartbeats, while calls are retried."""

from __future__ import annotations

import socket

import pytest
from fixtures.command_line import questions
from fixtures.waiting import wait_until

OFTEN = {"ROLLOUT_LEASE__HEARTBEAT_S": "1"}


@pytest.fixture
def closed_port() -> int:
    """A port of loopback where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_failing_calls_are_in_status_and_log_while_they_are_retried(rollout, folder, closed_port):
    base_url = f"http://127.0.0.1:{closed_port}/v1"
    questions(folder / "sums.jsonl", 4)
    rollout("submit", "sums.jsonl", "--run", "sums", "--base-url", base_url, "--model", "m")
    rollout.start("controller", environment=OFTEN)
    worker = rollout.start("worker", environment=OFTEN)

    def failing() -> dict:
        status = rollout.json("status", "sums")
        calls = status["model_calls"]
        return status if calls and calls[0]["failures"] else {}

    status = wait_until(failing, 60, seen=lambda: worker.err)
    assert status["rollouts"]["failed"] == 0, "and nothing has failed for good"
    (calls,) = status["model_calls"]
    assert (calls["base_url"], calls["model"]) == (base_url, "m")
    (failure,) = calls["failures"]
    assert failure["count"] == calls["count"] >= 1
    assert (failure["code"], failure["message"]) == ("connection", "connection refused")
    waits = f"It waits for the model server {base_url}: all "
    assert any(sentence.startswith(waits) for sentence in status["waits"])
    shown = rollout("status", "sums").out
    assert waits in shown
    assert "failed: " in shown
    assert f"Model server {base_url}: a call failed (connection refused)." in worker.err
    rollout.json("cancel", "sums", "--yes")
