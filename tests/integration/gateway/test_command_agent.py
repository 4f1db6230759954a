"""The agent `command`: a program in a sandbox that reaches its model and nothing else."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fixtures.scripted_model import scripted_model
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.trajectory import unpack_record

pytestmark = pytest.mark.usefixtures("some_sandbox")

#: A command-line agent: asks the model by its environment, and prints the answer.
AGENT = """
import json, os, sys, urllib.request
def ask(text):
    body = {"model": os.environ["MODEL_ID"], "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
#: Tries what it must not reach.
INTRUDER = (
    AGENT
    + """
import socket
def reaches(address):
    try:
        socket.create_connection(address, 2).close()
        return True
    except OSError:
        return False
url = sys.argv[2]
host, port = url.split("//")[1].split("/")[0].split(":")
print(ask(sys.argv[1]), reaches((host, int(port))), reaches(("10.255.255.1", 80)))
"""
)


def run_of(engine: Engine, *command: str, **config: Any) -> StoredRun:
    words = [sys.executable, "-c", *command]
    return StoredRun(engine, agent="command", agent_config={"command": words, **config})


def test_the_output_of_a_command_is_the_answer(engine: Engine, make_worker):
    story = run_of(engine, AGENT + "print(ask(sys.argv[1]))", "{prompt}")
    with scripted_model(lambda _: "1") as model:
        (completion,) = make_worker(model.base_url).work(story)
    assert completion.outcome == "succeeded", completion.error
    assert (completion.reward, completion.n_turns, completion.prompt_tokens) == (1.0, 1, 11)
    assert unpack_record(completion.body).messages == [
        {"role": "user", "content": "What is 0 + 1?"},
        {"role": "assistant", "content": "1"},
    ]


def test_a_file_may_be_the_answer_and_files_come_with_the_prompt(engine: Engine, make_worker):
    program = AGENT + "open('out.txt', 'w').write(ask(open(sys.argv[1]).read()))"
    story = run_of(engine, program, "{prompt_file}", answer={"file": "out.txt"})
    with scripted_model(
        lambda messages: "1" if "0 + 1" in messages[0]["content"] else "?"
    ) as model:
        (completion,) = make_worker(model.base_url).work(story)
    assert (completion.outcome, completion.reward) == ("succeeded", 1.0), completion.error


def test_a_command_reaches_its_model_and_nothing_else(engine: Engine, make_worker):
    with scripted_model(lambda _: "1") as model:
        story = run_of(engine, INTRUDER, "{prompt}", model.base_url)
        (completion,) = make_worker(model.base_url).work(story)
    assert completion.error is None
    assert unpack_record(completion.body).final_answer == "1 False False"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (AGENT + "ask('x'); sys.exit('out of ideas')", "out of ideas"),
        (AGENT + "ask('x')", "left no answer in out.txt"),
        ("open('out.txt', 'w').write('1')", "ended without a model call"),
    ],
)
def test_a_command_without_an_answer_is_an_error(engine: Engine, make_worker, program, words):
    story = run_of(engine, program, answer={"file": "out.txt"})
    with scripted_model(lambda _: "1") as model:
        (completion,) = make_worker(model.base_url).work(story, 1)
    assert completion.outcome == "failed"
    assert completion.reward is None
    assert words in completion.error.message


def test_a_failed_model_is_the_error_and_not_the_command(engine: Engine, make_worker):
    story = run_of(engine, AGENT + "ask('x')")
    (completion,) = make_worker("http://127.0.0.1:9/v1").work(story)
    assert completion.error.error_class == "model_transport"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "needs its option command"),
        ({"command": ["x"], "sandbox": "docker"}, "not in docker"),
        ({"command": ["x"], "answer": {"path": "y"}}, "answer"),
    ],
)
def test_options_that_cannot_work_are_refused(engine: Engine, make_worker, config, words):
    story = StoredRun(engine, agent="command", agent_config=config)
    (completion,) = make_worker("http://127.0.0.1:9/v1").work(story)
    assert completion.error.error_class == "contract"
    assert words in completion.error.message
