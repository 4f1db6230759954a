"""Messages: what is written is what is read; anything else is refused with a reason."""

from __future__ import annotations

import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from pipeline.contract.errors import ErrorClass, MalformedMessage
from pipeline.contract.messages import (
    SCHEMA,
    AttemptBeat,
    Completion,
    ErrorRecord,
    Heartbeat,
    RewardPart,
    RolloutRequest,
    parse_message,
)
from pipeline.contract.rollout import LABEL_PATTERN, StopReason
from pipeline.contract.run import AttemptLimits
from pipeline.queue.frames import decode_completions, encode_completions

finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
small = st.integers(min_value=0, max_value=2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, json_values, max_size=3)
labels = st.from_regex(LABEL_PATTERN, fullmatch=True)

requests = st.builds(
    RolloutRequest,
    schema_version=st.just(SCHEMA),
    run=texts,
    group_no=small,
    rollout_index=small,
    n=small,
    attempt_no=st.integers(1, 1000),
    label=labels,
    prompt=objects,
    agent=texts,
    agent_config=objects,
    tools=st.lists(texts, max_size=3).map(tuple),
    tools_config=st.dictionaries(texts, objects, max_size=2),
    reward=st.none() | texts,
    reward_config=objects,
    model=st.none() | texts,
    base_url=st.none() | texts,
    sampling=objects,
    limits=st.just(AttemptLimits()),
    scored=st.lists(st.sampled_from(ErrorClass), max_size=3).map(tuple),
    policy_version=small,
    weight=st.floats(0.1, 10),
)
errors = st.builds(
    ErrorRecord,
    error_class=st.sampled_from(ErrorClass),
    code=texts,
    message=texts,
    detail=texts,
    phase=texts,
    retry_after_s=st.none() | st.floats(0, 1e6),
)
parts = st.builds(
    RewardPart,
    name=texts,
    value=st.none() | finite,
    weight=finite,
    error_class=st.none() | st.sampled_from(ErrorClass),
    latency_ms=st.floats(0, 1e6),
    scorer_version=texts,
)
completions = st.builds(
    Completion,
    schema_version=st.just(SCHEMA),
    attempt_no=st.integers(1, 1000),
    label=labels,
    worker_id=texts,
    stop_reason=st.none() | st.sampled_from(StopReason),
    reward=st.none() | finite,
    reward_parts=st.lists(parts, max_size=2).map(tuple),
    error=st.none() | errors,
    n_turns=small,
    n_steps=small,
    prompt_tokens=small,
    completion_tokens=small,
    version_min=st.none() | small,
    version_max=st.none() | small,
    timings=st.dictionaries(texts, st.floats(0, 1e6), max_size=2),
    codec=st.just("zstd+json"),
    body=st.binary(max_size=200),
    body_bytes=small,
    body_uri=st.none() | texts,
    body_digest=st.none() | st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
)
beats = st.builds(
    Heartbeat,
    schema_version=st.just(SCHEMA),
    worker_id=texts,
    sequence=small,
    attempts=st.lists(
        st.builds(AttemptBeat, attempt_no=small, phase=texts, step=small), max_size=3
    ).map(tuple),
    capacity=small,
    loop_lag_ms=st.floats(0, 1e6),
)


@given(message=requests | beats)
def test_a_message_read_back_is_the_message(message):
    assert parse_message(type(message), message.model_dump_json()) == message


@given(message=requests)
def test_defaults_left_out_of_a_request_come_back(message):
    assert parse_message(RolloutRequest, message.model_dump_json(exclude_defaults=True)) == message


def test_a_request_of_the_version_before_is_read():
    """Shared fields are inherited and not nested, so messages in flight survive an upgrade."""
    older = (
        '{"run_id":"00000000-0000-0000-0000-000000000007","run":"math7","group_no":13,"n":8,'
        '"group_id":"00000000-0000-0000-0000-00000000000d","rollout_index":2,"attempt_no":1,'
        '"rollout_id":"00000000-0000-0000-0000-000000000002","label":"math7-g000013-r2-a1",'
        '"prompt":{"prompt":"6 * 7?"},"agent":"react","tools":["calculator"],"reward":"numeric",'
        '"limits":{"max_tokens":64},"scored":["policy_limit"],"policy_version":12,"weight":2.0}'
    )
    read = parse_message(RolloutRequest, older)
    assert json.loads(read.model_dump_json(exclude_defaults=True)) == json.loads(older)


@given(completion=completions)
def test_a_completion_of_the_version_before_is_read(completion):
    older = json.loads(completion.model_dump_json())
    del older["body_digest"]
    expected = completion.model_copy(update={"body": b"", "body_digest": None})
    assert parse_message(Completion, json.dumps(older)) == expected


@given(batch=st.lists(completions, max_size=4))
def test_completions_read_back_from_a_frame_are_the_completions(batch):
    good, bad = decode_completions(encode_completions(batch))
    assert good == batch
    assert not bad


@given(completion=completions)
def test_the_body_never_travels_inside_the_json(completion):
    assert "body" not in json.loads(completion.model_dump_json())


def request(**fields: object) -> RolloutRequest:
    values: dict[str, object] = {
        "run": "math7",
        "run_id": uuid.uuid4(),
        "group_id": uuid.uuid4(),
        "group_no": 13,
        "rollout_id": uuid.uuid4(),
        "rollout_index": 2,
        "n": 8,
        "attempt_no": 1,
        "label": "math7-g000013-r2-a1",
        "prompt": {},
        "agent": "react",
    }
    return RolloutRequest.model_validate(values | fields)


def test_a_request_describes_itself_in_the_one_line_flower_shows():
    assert request(policy_version=12).describe() == "run=math7 group=g000013 rollout=3/8 policy=12"


@pytest.mark.parametrize("kind", [RolloutRequest, Completion, Heartbeat])
def test_a_message_of_a_future_schema_is_refused_by_its_number(kind):
    examples: dict[type[BaseModel], BaseModel] = {
        RolloutRequest: request(),
        Completion: completion(),
        Heartbeat: Heartbeat(worker_id="w", sequence=1),
    }
    future = examples[kind].model_copy(update={"schema_version": SCHEMA + 1}).model_dump_json()
    with_more = future[:-1] + ', "a_field_of_the_future": 1}'
    for data in (future, with_more, with_more.encode()):
        with pytest.raises(MalformedMessage, match=rf"schema {SCHEMA + 1}.*reads {SCHEMA}"):
            parse_message(kind, data)


@pytest.mark.parametrize("label", ["../../etc/cron.d/x", "/x", "a/b", "a\\b", "", "a\n", "x" * 129])
def test_a_label_that_leads_elsewhere_is_refused(label):
    for kind, message in ((RolloutRequest, request()), (Completion, completion())):
        forged = message.model_copy(update={"label": label}).model_dump_json()
        with pytest.raises(MalformedMessage, match="label"):
            parse_message(kind, forged)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("not json", "JSON"),
        ("[]", "object"),
        ("{}", "worker_id"),
        ('{"worker_id": "w", "sequence": "many"}', "sequence"),
        ('{"worker_id": "w", "sequence": 1, "shout": 1}', "shout"),
        ('{"worker_id": "w", "sequence": 1, "loop_lag_ms": NaN}', "JSON|finite"),
        (b"\xff\xfe", "JSON"),
    ],
    ids=["text", "list", "empty", "wrong-type", "unknown-field", "nan", "not-utf8"],
)
def test_what_is_no_heartbeat_is_refused_and_the_reason_names_the_place(data, why):
    with pytest.raises(MalformedMessage, match=why):
        parse_message(Heartbeat, data)


@given(data=st.binary(max_size=100) | texts)
def test_no_bytes_raise_anything_but_malformed_message(data):
    try:
        parse_message(Completion, data)
    except MalformedMessage:
        pass
    try:
        decode_completions(data if isinstance(data, bytes) else data.encode())
    except MalformedMessage:
        pass


def completion(**fields: object) -> Completion:
    values: dict[str, object] = {
        "run_id": uuid.uuid4(),
        "group_id": uuid.uuid4(),
        "rollout_id": uuid.uuid4(),
        "attempt_no": 1,
        "label": "a",
        "worker_id": "w",
        "outcome": "succeeded",
    }
    return Completion.model_validate(values | fields)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_a_reward_that_is_no_finite_number_cannot_be_said(reward):
    with pytest.raises(ValidationError):
        completion(reward=reward)


def test_a_bad_completion_in_a_frame_leaves_its_neighbours_alone():
    good = [completion(body=b"one"), completion(body=b"three")]
    bad = completion(label="bad", body=b"two").model_copy(update={"schema_version": 99})
    found, refused = decode_completions(encode_completions([good[0], bad, good[1]]))
    assert found == good
    (item,) = refused
    assert "schema 99" in item.reason
    again, still_refused = decode_completions(item.raw)
    assert (again, still_refused) == ([], [item]), "what is kept can be decoded again, later"
    assert item.raw.endswith(b"two")


def test_both_bodies_of_a_completion_travel_beside_its_header():
    digest = "0" * 32
    sent = [
        completion(body=b"one", tokens=b"ids of one", tokens_digest=digest),
        completion(body=b"two"),
        completion(tokens=b"ids alone", tokens_digest=digest),
    ]
    assert decode_completions(encode_completions(sent)) == (sent, [])


def test_a_frame_without_tokens_is_the_one_that_earlier_versions_read():
    frame = encode_completions([completion(body=b"one")])
    assert b"tokens_" not in frame


def test_a_frame_of_a_version_without_tokens_is_read():
    one = completion(body=b"one")
    header = one.model_dump_json(exclude={"tokens_bytes", "tokens_uri", "tokens_digest"})
    index = json.dumps({"headers": [header], "sizes": [3]}).encode()
    frame = b"RPC1" + len(index).to_bytes(4, "big") + index + b"one"
    assert decode_completions(frame) == ([one], [])


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, -1])
def test_a_frame_that_was_cut_is_refused_whole(cut):
    frame = encode_completions([completion(body=b"body")])
    with pytest.raises(MalformedMessage):
        decode_completions(frame[:cut])
