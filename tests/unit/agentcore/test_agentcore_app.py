"""What an app answers, saves and announces."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest
from fixtures.agentcore_apps import GOOD, ROLLOUT, SESSION, TRAINING, served

from pipeline.contract.result_keys import ResultObject, announced_results
from workers.agentcore.app import AgentCoreRLApp
from workers.agentcore.invocation import rollout_config


def without(section: dict, name: str) -> dict:
    return {key: value for key, value in section.items() if key != name}


def test_a_training_result_is_saved_and_announced_under_its_key():
    with served(lambda payload: {**GOOD, "mine": payload["prompt"]}) as it:
        answer = it.invoke({"prompt": "p", "_training": TRAINING})
        assert (answer.status_code, answer.json()) == (200, {"status": "processing"})
        it.wait()
    (stored,) = it.saved.objects
    assert stored["Key"] == f"exp/in_{SESSION}.json"
    assert (stored["Bucket"], stored["Type"]) == ("bucket", "application/json")
    assert json.loads(stored["Body"]) == {
        **GOOD,
        "mine": "p",
        "status_code": 200,
        "stop_reason": "end_turn",
        "input_id": "in",
    }
    (message,) = it.saved.messages
    assert message["url"] == TRAINING["sqs_url"]
    (record,) = message["body"]["Records"]
    assert record["eventSource"] == "rollout:collector"
    assert record["eventName"] == "ObjectCreated:Put"
    assert announced_results(json.dumps(message["body"])) == [ResultObject("bucket", stored["Key"])]


def test_a_rollout_result_names_its_place_and_hides_the_key():
    rollout = {**ROLLOUT, "api_key": "secret", "base_url": "http://m/v1"}
    with served(lambda payload: {"anything": 1}) as it:
        answer = it.invoke({"prompt": "p", "_rollout": rollout}).json()
        it.wait()
    key = f"exp/in/{SESSION}.json"
    assert answer == {"status": "processing", "s3_bucket": "bucket", "result_key": key}
    (result,) = it.saved.results()
    assert result == {
        "anything": 1,
        "status_code": 200,
        "stop_reason": "end_turn",
        "input_id": "in",
        "s3_bucket": "bucket",
        "result_key": key,
        "payload": {"prompt": "p", "_rollout": {**rollout, "api_key": "***"}},
    }
    assert it.saved.messages == []


@pytest.mark.parametrize(
    ("header", "training", "expected"),
    [
        ("h" * 40, TRAINING, "h" * 40),
        (None, TRAINING, SESSION),
        (None, None, None),
    ],
)
def test_the_session_is_the_headers_else_the_trainings_else_a_new_one(header, training, expected):
    payload = {"_rollout": ROLLOUT} | ({"_training": training} if training else {})
    with served(lambda payload: {"rewards": 0.5}) as it:
        answer = it.invoke(payload, session=header).json()
        it.wait()
    (stored,) = it.saved.objects
    assert stored["Key"] == answer["result_key"]
    if expected is None:
        assert len(stored["Key"]) == len("exp/in/.json") + 36
    else:
        assert stored["Key"] == f"exp/in/{expected}.json"
    assert len(it.saved.messages) == (1 if training else 0)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("bad", ["missing", "", "  ", 7, None, ["x"]])
def test_a_bad_training_field_is_refused_at_once_and_named(name, bad):
    section = without(TRAINING, name) if bad == "missing" else {**TRAINING, name: bad}
    with served(lambda payload: GOOD) as it:
        answer = it.invoke({"_training": section})
        assert answer.status_code == 400
        assert name in answer.json()["error"]
        assert not it.is_busy()


@pytest.mark.parametrize("name", ROLLOUT)
def test_an_incomplete_rollout_is_a_500_that_names_the_field(name):
    with served(lambda payload: GOOD) as it:
        answer = it.invoke({"_rollout": without(ROLLOUT, name)})
        assert answer.status_code == 500
        assert answer.json() == {"error": f"Missing required rollout config field: {name!r}"}
        for bad in ("", 3, None):
            answer = it.invoke({"_rollout": {**ROLLOUT, name: bad}})
            assert answer.status_code == 500
            assert name in answer.json()["error"]


@pytest.mark.parametrize("name", ["exp_id", "input_id", "session_id"])
def test_ids_hold_no_slash(name):
    with served(lambda payload: GOOD) as it:
        answer = it.invoke({"_training": {**TRAINING, name: "a/b"}})
    assert answer.status_code == 400
    assert name in answer.json()["error"]


@pytest.mark.parametrize("section", ["_training", "_rollout"])
def test_a_section_that_is_no_object_is_refused(section):
    with served(lambda payload: GOOD) as it:
        assert section in it.invoke({section: ["x"]}).json()["error"]


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"prompt": "p"},
        {"_training": {}},
        {"_rollout": {}},
        {"_rollout": {"base_url": "http://m"}},
        {"_training": None, "_rollout": None},
    ],
)
def test_without_a_destination_the_entrypoint_runs_and_nothing_is_saved(payload):
    ran = threading.Event()
    with served(lambda _: ran.set()) as it:
        answer = it.invoke(payload)
        assert (answer.status_code, answer.json()) == (200, {"status": "processing"})
        it.wait()
    assert ran.is_set()
    assert it.saved.objects == it.saved.messages == []


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("text", "dict"),
        (None, "dict"),
        ({"rewards": 1.0}, "rollout_data"),
        ({"rollout_data": [], "rewards": 1.0}, "rollout_data"),
        ({"rollout_data": {"a": 1}, "rewards": 1.0}, "rollout_data"),
        ({"rollout_data": [{}]}, "rewards"),
        *(
            ({"rollout_data": [{}, {}], "rewards": rewards}, "rewards")
            for rewards in (
                float("nan"),
                float("inf"),
                "1.0",
                True,
                None,
                [],
                [1.0, [0.5]],
                [1.0, 0.0, 0.5],
                [1.0, None],
                [float("-inf")],
                [True],
                10**400,
            )
        ),
        ({"rollout_data": [{"x": {1, 2}}], "rewards": 1.0}, "JSON"),
        ({"rollout_data": [{"x": float("nan")}], "rewards": 1.0}, "JSON"),
    ],
)
def test_a_wrong_shape_becomes_a_contract_error_with_valid_json(returned, words):
    with served(lambda payload: returned) as it:
        result = it.result({"_training": TRAINING})
    assert result["status_code"] == 500
    assert result["error_class"] == "contract"
    assert words in result["stop_reason"]
    assert result["input_id"] == "in"


@pytest.mark.parametrize("rewards", [0, 0.0, -1.5, [1.0], [0.0, 1], 3])
def test_a_number_a_list_of_one_and_one_per_turn_are_rewards(rewards):
    with served(lambda payload: {"rollout_data": [{}, {}], "rewards": rewards}) as it:
        result = it.result({"_training": TRAINING})
    assert (result["status_code"], result["rewards"]) == (200, rewards)


def test_where_rewards_are_optional_a_result_may_have_none_and_a_bad_one_is_refused():
    payload = {"_training": {**TRAINING, "rewards": "optional"}}
    with served(lambda payload: {"rollout_data": [{}]}) as it:
        result = it.result(payload)
    assert (result["status_code"], "rewards" in result) == (200, False)
    with served(lambda payload: {"rollout_data": [{}], "rewards": "much"}) as it:
        assert it.result(payload)["error_class"] == "contract"


def test_with_both_sections_turns_may_be_missing_and_rewards_are_checked():
    payload = {"_training": TRAINING, "_rollout": ROLLOUT}
    with served(lambda payload: {"rewards": 1.0}) as it:
        assert it.result(payload)["status_code"] == 200
        assert len(it.saved.messages) == 1
    with served(lambda payload: {"rewards": float("nan")}) as it:
        result = it.result(payload)
    assert (result["status_code"], result["error_class"]) == (500, "contract")
    assert result["result_key"] == f"exp/in/{SESSION}.json"


class Exits(BaseException):
    """Not an `Exception`."""


@pytest.mark.parametrize(
    "error", [ValueError("broken"), SystemExit("broken"), Exits("broken"), StopIteration("broken")]
)
@pytest.mark.parametrize("is_async", [True, False])
def test_whatever_an_entrypoint_raises_becomes_an_error_rollout(error, is_async):
    async def later(payload):
        raise error

    def now(payload):
        raise error

    with served(later if is_async else now) as it:
        result = it.result({"_training": TRAINING})
        assert result["status_code"] == 500
        assert result["error_class"] == "agent_bug"
        assert "broken" in result["stop_reason"] + result["traceback"]
        assert "Traceback" in result["traceback"]
        assert len(it.saved.messages) == 1
        # The loop that all rollouts of the process share goes on.
        assert it.invoke({}).status_code == 200


def test_an_error_is_saved_without_the_secrets_that_it_quotes(monkeypatch):
    monkeypatch.setenv("TOOL_API_KEY", "sk-of-a-tool")
    gateway_key, model_key = "rpk-abc.0123", "sk-of-the-model"

    def fails(payload):
        turns = [{"turn_id": 0, "sent": model_key}]
        error = RuntimeError(f"refused: {gateway_key}, {model_key}, sk-of-a-tool")
        error.rollout_data = turns  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    with served(fails) as it:
        assert it.invoke({"_rollout": {**ROLLOUT, "api_key": model_key}}).status_code == 200
        it.wait()
        (saved,) = it.saved.objects
    assert json.loads(saved["Body"])["stop_reason"] == "refused: ***, ***, ***"
    assert not any(key.encode() in saved["Body"] for key in (gateway_key, model_key, "sk-of-a"))


def test_models_find_their_gateway_in_a_training_payload_alone():
    def names(payload):
        return {**GOOD, "found": dict(rollout_config())["base_url"]}

    with served(names) as it:
        training = {**TRAINING, "base_url": "http://gateway/v1", "api_key": "rpk-a.0"}
        assert it.result({"_training": training})["found"] == "http://gateway/v1"


def test_a_cancelled_rollout_leaves_an_error_result():
    async def cancelled(payload):
        raise asyncio.CancelledError

    with served(cancelled) as it:
        result = it.result({"_training": TRAINING})
    assert (result["status_code"], result["error_class"]) == (500, "agent_bug")


def test_a_stopped_app_saves_an_error_for_what_it_interrupts():
    async def endless(payload):
        await asyncio.Event().wait()

    with served(endless) as it:
        it.invoke({"_training": TRAINING})
        assert it.is_busy()
    (result,) = it.saved.results()
    assert result["status_code"] == 500
    assert "stopped" in result["stop_reason"]


def test_an_error_keeps_the_turns_that_came_before_it():
    class Failed(RuntimeError):
        def __init__(self):
            self.rollout_data = [{"turn_id": 0}]

    def fails(payload):
        raise Failed

    with served(fails) as it:
        assert it.result({"_training": TRAINING})["rollout_data"] == [{"turn_id": 0}]
    with served(lambda payload: {"rollout_data": [{"turn_id": 0}], "rewards": "bad"}) as it:
        assert it.result({"_training": TRAINING})["rollout_data"] == [{"turn_id": 0}]


@pytest.mark.parametrize("with_context", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_entrypoints_are_sync_or_async_with_or_without_context(is_async, with_context):
    def rollout(payload, context=None):
        return {**GOOD, "session": context.session_id if context else None}

    async def later(payload, context):
        return rollout(payload, context)

    async def later_alone(payload):
        return rollout(payload)

    chosen = {
        (True, True): later,
        (True, False): later_alone,
        (False, True): rollout,
        (False, False): lambda payload: rollout(payload),
    }[is_async, with_context]
    with served(chosen) as it:
        assert it.result({"_training": TRAINING})["session"] == (SESSION if with_context else None)


def test_the_same_session_again_while_it_runs_is_answered_and_not_run_twice():
    go, calls = threading.Event(), []

    def waits(payload):
        calls.append(payload)
        go.wait(10)
        return {"rewards": 1.0}

    with served(waits) as it:
        payload = {"_rollout": ROLLOUT}
        first, second = it.invoke(payload), it.invoke(payload)
        assert first.json() == second.json()
        assert it.is_busy()
        go.set()
        it.wait()
        assert (len(calls), len(it.saved.objects)) == (1, 1)


def test_a_put_and_a_send_that_fail_are_tried_again(monkeypatch):
    monkeypatch.setattr("workers.agentcore.publication._FIRST_WAIT_S", 0.001)
    with served(lambda payload: GOOD, failures=4) as it:
        assert it.result({"_training": TRAINING})["status_code"] == 200
        assert len(it.saved.messages) == 1
    with served(lambda payload: GOOD, failures=100) as it:
        it.invoke({"_training": TRAINING})
        it.wait()
        assert it.saved.tries >= 3


def test_busy_until_published():
    with served(lambda payload: GOOD) as it:
        go = threading.Event()
        put = it.saved.put_object
        it.saved.put_object = lambda **kw: (go.wait(10), put(**kw))  # pyright: ignore
        it.invoke({"_training": TRAINING})
        assert it.is_busy()
        go.set()
        it.wait()
        assert it.saved.objects


def test_an_app_needs_no_celery_and_no_database_driver():
    code = """
import sys
for name in ("celery", "kombu", "psycopg", "sqlalchemy", "redis"):
    sys.modules[name] = None
import workers.agentcore as package
assert not {"boto3", "bedrock_agentcore", "strands"} & set(sys.modules), "lazy"
assert {"AgentCoreRLApp", "RewardFunction", "StrandsAgentCoreRLApp"} <= set(dir(package))
app = package.AgentCoreRLApp()
package.StrandsAgentCoreRLApp().create_openai_compatible_model()
package.StrandsRolloutCollector()
print("made")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "made\n", done.stderr


def test_log_lines_are_json_with_the_session():
    lines = []

    def says(payload):
        import logging

        from workers.agentcore.logging import CorrelatedFormatter

        record = logging.makeLogRecord({"msg": "hello %s", "args": ("you",), "levelname": "INFO"})
        lines.append(json.loads(CorrelatedFormatter().format(record)))
        return GOOD

    with served(says, app=AgentCoreRLApp()) as it:
        it.result({"_training": TRAINING})
    (line,) = lines
    assert (line["message"], line["sessionId"]) == ("hello you", SESSION)
    assert line["requestId"]
