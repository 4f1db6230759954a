"""The live view on a terminal: pace, retries, the model, and calls that fail."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.activity import CallFailures, EndpointCalls, RunActivity
from pipeline.contract.messages import Heartbeat
from pipeline.store.engine import transact
from pipeline.store.leases import keep_alive

URL = "http://models.example/v1"


def call_in_vain(story: StoredRun) -> None:
    """Have a worker say that all of its calls failed."""
    failures = CallFailures(code="timeout", count=7, last_minute=7, message="no answer")
    calls = EndpointCalls(base_url=URL, model="big", count=7, last_minute=7, failures=(failures,))
    activity = (RunActivity(run_id=story.run.run_id, endpoints=(calls,)),)
    beat = Heartbeat(worker_id="w1", sequence=1, capacity=3, activity=activity)
    transact(story.engine, lambda c: keep_alive(c, [beat], lease_s=60))


def shown_on_a_terminal(*arguments: str, **options: object) -> str:
    """Run a command whose stderr is a terminal; return what it showed there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rollout", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, **options)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux says EIO where the other end is closed
        pass
    finally:
        os.close(ours)
        process.wait(60)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_the_panel_shows_pace_retries_model_and_failing_calls(
    rollout, folder, engine: Engine, database_url: str
):
    story = StoredRun(engine, prompts=4, slug="sums")
    first, second, *_ = story.claim()
    story.record(story.succeeded(first), story.failed(second))
    call_in_vain(story)
    environment = {**rollout.environment, "ROLLOUT_DATABASE__URL": database_url, "COLUMNS": "160"}
    shown = shown_on_a_terminal("watch", "sums", "--timeout-s", "3", cwd=folder, env=environment)
    assert "1/4" in shown
    assert "attempts  4   retries 1" in shown
    assert "tokens/s 0" in shown
    assert "time left unknown" in shown
    assert f"calls     7 to {URL} (big), 7 failed: 7 timeout" in shown
    assert f"It waits for the model server {URL}: all 7 calls in the last minute failed" in shown
