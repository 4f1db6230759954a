"""What a result of a remote session says about its attempt."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from fixtures.messages import request_of

from pipeline.agentcore.outcome import outcome_of, timed_out
from pipeline.contract.agentcore import (
    AgentCoreTarget,
    attempt_of_key,
    payload_of,
    session_id_of,
)
from pipeline.contract.result_keys import rollout_key, training_key
from pipeline.contract.trajectory import unpack_record
from pipeline.redaction import Redactor
from pipeline.store.remote_sessions import RemoteAttempt

TARGET = AgentCoreTarget(
    target="arn:aws:bedrock-agentcore:us-west-2:1:runtime/x",
    results_bucket="b",
    results_queue_url="http://q",
)
ROLLOUT_ID = uuid4()
ATTEMPT = RemoteAttempt(
    uuid4(), uuid4(), ROLLOUT_ID, 2, "math", 7, "math-g000007-r1-a2", TARGET, "w", None, False, 3
)
TURN = {"formatted_request": {"messages": [{"role": "assistant", "content": "4"}]}}


def read(result, **options):
    body = result if isinstance(result, bytes) else json.dumps(result).encode()
    return outcome_of(ATTEMPT, body, elapsed_s=1.0, **options)


@pytest.mark.parametrize(
    ("rewards", "expected"), [(1, 1.0), (0.0, 0.0), ([0.5], 0.5), ([0.1, -0.2], -0.2)]
)
def test_the_reward_is_the_number_or_the_last_of_the_list(rewards, expected):
    completion = read({"status_code": 200, "rewards": rewards, "rollout_data": [TURN, TURN]})
    assert (completion.outcome, completion.reward) == ("succeeded", expected)
    assert completion.key == (ROLLOUT_ID, 2)


@pytest.mark.parametrize(
    "rewards", [float("nan"), float("inf"), "1", True, None, [], [[1.0]], [1.0, None], 10**400, {}]
)
def test_a_bad_reward_is_a_contract_error_and_no_reward(rewards):
    completion = read({"status_code": 200, "rewards": rewards, "rollout_data": [TURN]})
    assert (completion.error_class, completion.reward) == ("contract", None)
    assert completion.error is not None
    assert completion.error.code == "bad_reward"


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({"status_code": 200}, "no_reward"),
        (b"no json", "result_no_json"),
        (b"[1]", "result_no_json"),
        (b"\xff\xfe", "result_no_json"),
        (b"[" * 100_000, "result_no_json"),
    ],
)
def test_no_reward_and_no_json_are_contract_errors(result, code):
    completion = read(result)
    assert (completion.error_class, completion.error and completion.error.code) == (
        "contract",
        code,
    )


@pytest.mark.parametrize("own", [{}, {"rewards": 0.9}, {"rewards": "much"}])
def test_where_the_run_names_a_reward_that_of_the_app_is_only_kept(own):
    completion = outcome_of(
        ATTEMPT._replace(reward="ours"),
        json.dumps({"rollout_data": [TURN], "stop_reason": "length", **own}).encode(),
        elapsed_s=1.0,
    )
    assert (completion.purpose, completion.outcome, completion.reward) == (
        "unscored",
        "succeeded",
        None,
    )
    metadata = unpack_record(completion.body).metadata
    assert (metadata["rewards"], metadata["stop_reason"]) == (own.get("rewards"), "max_tokens")


@pytest.mark.parametrize("result", [{}, {"rollout_data": [{}]}, {"rewards": 1.0}])
def test_a_reward_is_not_asked_about_a_result_without_an_answer(result):
    completion = outcome_of(
        ATTEMPT._replace(reward="ours"), json.dumps(result).encode(), elapsed_s=1.0
    )
    assert completion.error is not None
    assert (completion.error_class, completion.error.code) == ("contract", "no_answer")


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "agent_bug"), ("agent_bug", "agent_bug"), ("contract", "contract"), (7, "agent_bug")],
)
def test_the_apps_error_keeps_its_class_words_and_turns(given, expected):
    result = {
        "status_code": 500,
        "stop_reason": "it broke",
        "traceback": "Traceback ...",
        "rollout_data": [TURN],
        "error_class": given,
    }
    completion = read({key: value for key, value in result.items() if value is not None})
    assert completion.error is not None
    assert (completion.error_class, completion.error.message) == (expected, "it broke")
    assert completion.error.detail == "Traceback ..."
    assert unpack_record(completion.body).messages == [{"role": "assistant", "content": "4"}]


def test_turns_are_stored_once_and_the_last_ones_messages_are_the_record():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    more = [*messages, {"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}]
    turns = [
        {"turn_id": 0, "formatted_request": {"messages": messages, "model": "m"}},
        {"turn_id": 1, "formatted_request": {"messages": more}},
    ]
    record = unpack_record(read({"rewards": 1, "rollout_data": turns}).body)
    assert record.messages == more
    assert record.final_answer == "b"
    assert record.metadata["turns"] == [
        {"turn_id": 0, "formatted_request": {"model": "m", "n_messages": 2}},
        {"turn_id": 1, "formatted_request": {"n_messages": 4}},
    ]


@pytest.mark.parametrize("turns", [None, 7, [None], [{"formatted_request": 3}], ["x"]])
def test_turns_of_any_shape_are_kept(turns):
    assert read({"rewards": 1, "rollout_data": turns}).outcome == "succeeded"


def test_a_session_without_a_result_says_how_long_was_waited():
    completion = timed_out(ATTEMPT)
    assert completion.error_class == "agent_timeout"
    assert completion.error is not None
    assert "900 s" in completion.error.message
    assert completion.reward is None


def test_a_key_names_its_attempt_in_either_style():
    session = session_id_of(ATTEMPT.label, ROLLOUT_ID)
    assert 33 <= len(session) <= 256
    of_session = "math", "g000007", session
    for key in (rollout_key(*of_session), training_key(*of_session)):
        assert attempt_of_key(key) == (ROLLOUT_ID, 2)
    for other in ("", "a/b.json", "math/g000007/x.json", f"math/g000007-{session}.json"):
        assert attempt_of_key(other) is None


@pytest.mark.parametrize("style", ["training", "rollout", "both"])
def test_a_payload_has_the_prompt_its_columns_and_the_sections_of_its_style(style):
    payload = payload_of(
        TARGET.model_copy(update={"payload_style": style}),
        run="math",
        group_no=7,
        session_id="s" * 33,
        prompt={"content": "2+2?", "answer": "4", "level": 3, "_rollout": "theirs"},
        model={"base_url": "http://m/v1"},
    )
    assert (payload["prompt"], payload["answer"], payload["level"]) == ("2+2?", "4", 3)
    assert ("_training" in payload) == (style != "rollout")
    assert ("_rollout" in payload) == (style != "training")
    if style != "rollout":
        assert payload["_training"] == {
            "exp_id": "math",
            "input_id": "g000007",
            "session_id": "s" * 33,
            "sqs_url": "http://q",
            "s3_bucket": "b",
        }
    if style != "training":
        assert payload["_rollout"]["base_url"] == "http://m/v1"


def test_a_payload_says_that_a_reward_of_the_run_scores_the_result():
    payload = payload_of(
        TARGET,
        run="math",
        group_no=7,
        session_id="s" * 33,
        prompt={"content": "2+2?"},
        model={},
        reward="gsm8k",
    )
    assert payload["_training"]["rewards"] == "optional"


@pytest.mark.parametrize("style", ["training", "both"])
def test_a_training_section_that_stands_alone_names_the_gateway(style):
    named = {"base_url": "http://gateway/v1", "api_key": "rpk-a.0", "model_id": "m"}
    payload = payload_of(
        TARGET.model_copy(update={"payload_style": style}),
        run="math",
        group_no=7,
        session_id="s" * 33,
        prompt={"content": "2+2?"},
        model=named,
    )
    carriers = [name for name in ("_training", "_rollout") if "api_key" in payload.get(name, ())]
    assert carriers == ["_training" if style == "training" else "_rollout"]
    assert named.items() <= payload[carriers[0]].items()


def test_a_gateway_key_in_a_result_reaches_neither_error_nor_trajectory():
    key = "rpk-eyJydW4iOiJtYXRoIn0.0123456789abcdef"
    result = {
        "status_code": 500,
        "stop_reason": f"401 for {key}",
        "traceback": f"api_key={key!r}",
        "rollout_data": [TURN],
        "payload": {"_rollout": {"api_key": key}},
    }
    completion = read(result, redact=Redactor().data)
    assert completion.error is not None
    assert (completion.error.message, completion.error.detail) == ("401 for ***", "api_key='***'")
    assert key.encode() not in unpack_record(completion.body).model_dump_json().encode()


@pytest.mark.parametrize("index", [0, 3])
def test_the_seed_of_a_payload_differs_within_a_group_and_not_between_attempts(index):
    sampling = {"temperature": 1.0, "seed": 5}
    for attempt_no in (1, 2):
        request = request_of(sampling=sampling, rollout_index=index, attempt_no=attempt_no)
        assert request.own_sampling == {"temperature": 1.0, "seed": 5 + index}
