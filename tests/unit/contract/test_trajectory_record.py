"""Trajectory records as bytes."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract import trajectory
from pipeline.contract.errors import MalformedMessage
from pipeline.contract.model_call import CallTokens, ModelCall
from pipeline.contract.trajectory import (
    TrajectoryRecord,
    dump_json,
    pack_record,
    unpack_record,
)
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.process.records import record_of, trajectory_of

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=50)
records = st.builds(
    TrajectoryRecord,
    messages=st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3),
    steps=st.lists(st.dictionaries(texts, texts, max_size=2), max_size=3),
    calls=st.lists(
        st.builds(
            ModelCall,
            sequence=st.integers(0, 100),
            agent=texts,
            response=st.none() | st.dictionaries(texts, texts, max_size=2),
            policy_version=st.none() | st.integers(0, 9),
            sampling=st.dictionaries(texts, st.floats(0, 1), max_size=2),
            trainable=st.booleans(),
        ),
        max_size=2,
    ),
    metadata=st.dictionaries(texts, texts, max_size=2),
)


@given(record=records)
def test_a_record_unpacked_is_the_record(record):
    assert unpack_record(pack_record(record)) == record


def test_a_body_holds_no_token_ids():
    call = ModelCall(sequence=0, tokens=CallTokens(b"\1\0\0\0", b"\2\0\0\0"))
    record = unpack_record(pack_record(TrajectoryRecord(calls=[call])))
    assert record.calls == [ModelCall(sequence=0)]


def test_a_body_of_an_earlier_version_is_read_without_its_lists_of_ids():
    call = {"sequence": 0, "model": "qwen", "prompt_token_ids": [1], "logprobs": None}
    body = zstandard.compress(dump_json({"messages": [], "calls": [call]}))
    assert unpack_record(body).calls == [ModelCall(sequence=0, model="qwen")]


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [("observation", "What?")],
        [("thought", "I think."), ("observation", "And?")],
        [("action", "call"), ("action_result", "3")],
        [("final_answer", "4"), ("thought", "Done."), ("action_result", "3")],
        [("final_answer", "4"), ("final_answer", "5")],
    ],
)
def test_the_final_answer_of_a_record_is_what_was_scored(steps):
    trajectory = Trajectory("r", [TrajectoryStep(StepType(kind), said) for kind, said in steps])
    record = unpack_record(pack_record(record_of(trajectory, None)))
    assert record.final_answer == trajectory.get_final_response()


def test_an_answer_that_an_interaction_replied_to_is_the_final_answer_of_its_record():
    answer = TrajectoryStep(StepType.THOUGHT, "4", {"answered_by": "checker"})
    trajectory = Trajectory("r", [answer, TrajectoryStep(StepType.OBSERVATION, "Sure?")])
    record = unpack_record(pack_record(record_of(trajectory, None)))
    assert record.final_answer == trajectory.get_final_response() == "4"


def test_a_record_without_steps_has_no_final_answer():
    messages = [{"role": "assistant", "content": said} for said in ("3", "4")]
    record = TrajectoryRecord(messages=[*messages, {"role": "user", "content": "Sure?"}])
    assert record.final_answer == trajectory_of(record, "r").get_final_response() == ""


@given(body=st.binary(max_size=60))
def test_no_bytes_raise_anything_but_malformed_message(body):
    try:
        unpack_record(body)
    except MalformedMessage:
        pass


def test_a_body_of_another_codec_is_refused_by_name():
    with pytest.raises(MalformedMessage, match="'pickle'"):
        unpack_record(b"", "pickle")


def test_a_body_that_would_eat_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(trajectory, "MAX_BODY_BYTES", 1024)
    bomb = zstandard.compress(b"0" * 100_000)
    with pytest.raises(MalformedMessage, match="100000 bytes"):
        unpack_record(bomb)


def test_a_body_that_hides_its_size_is_refused_too(monkeypatch):
    monkeypatch.setattr(trajectory, "MAX_BODY_BYTES", 1024)
    packer = zstandard.ZstdCompressor(write_content_size=False)
    stream = packer.compressobj()
    bomb = stream.compress(b"0" * 100_000) + stream.flush()
    with pytest.raises(MalformedMessage):
        unpack_record(bomb)
