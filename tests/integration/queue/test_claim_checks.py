"""Large bodies: left in a folder or in S3, fetched by the reference that travelled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import boto3
import pytest
from fixtures.messages import completion_of
from fixtures.waiting import wait_until

from pipeline.contract.errors import ConfigError, ServiceUnavailable, UnreadableBody
from pipeline.contract.trajectory import digest_of
from pipeline.queue.broker import broker_of
from pipeline.queue.claim_checks import check_out, find_outcomes, load_body, load_object
from pipeline.queue.completions import OutcomeConsumer, OutcomePublisher
from pipeline.queue.frames import decode_completions
from pipeline.queue.payloads import FolderPayloads, PayloadStore, open_payloads

BIG = os.urandom(1024 * 1024)


@pytest.fixture
def bucket(aws_url: str, request: pytest.FixtureRequest) -> str:
    name = f"b{abs(hash(request.node.nodeid))}"
    boto3.client("s3", endpoint_url=aws_url, region_name="us-east-1").create_bucket(Bucket=name)
    return name


@pytest.fixture(params=["folder", "s3"])
def payloads(request: pytest.FixtureRequest, make_settings: Any) -> PayloadStore:
    """Each kind of payload store."""
    if request.param == "folder":
        return open_payloads(make_settings())
    bucket = request.getfixturevalue("bucket")
    url = request.getfixturevalue("aws_url")
    return open_payloads(
        make_settings(payloads={"url": f"s3://{bucket}/below/here"}, aws={"s3_endpoint_url": url})
    )


def test_what_is_put_can_be_read_and_put_again(payloads):
    uri = payloads.put("run/a.frame", b"one")
    assert payloads.uri("run/a.frame") == uri
    assert payloads.get(uri) == b"one"
    payloads.put("run/a.frame", b"two")
    assert payloads.get(uri) == b"two"


def test_the_objects_of_one_run_are_deleted_and_no_others(payloads):
    kept = [payloads.put(key, b"kept") for key in ("run/a.frame", "run-2/a.frame")]
    gone = [payloads.put(f"run1/{n}.frame", b"gone") for n in range(3)]
    assert payloads.delete_all("run1") == 3
    assert payloads.delete_all("run1") == 0
    assert [payloads.get(uri) for uri in gone] == [None] * 3
    assert [payloads.get(uri) for uri in kept] == [b"kept"] * 2


def test_what_is_not_there_is_none(payloads):
    assert payloads.get(payloads.uri("run/never.frame")) is None


def test_a_body_that_is_gone_is_said_to_be(payloads):
    with pytest.raises(UnreadableBody, match=r"is gone.*ROLLOUT_PAYLOADS__URL") as gone:
        load_body(payloads.uri("run/never.frame"), None, payloads)
    assert gone.value.code == "E206"


def test_a_payload_that_cannot_be_read_is_not_taken_for_one_that_is_gone(tmp_path):
    store = FolderPayloads(tmp_path)
    (tmp_path / "run" / "a.frame").mkdir(parents=True)
    with pytest.raises(ServiceUnavailable, match="cannot be read") as unreadable:
        store.get(store.uri("run/a.frame"))
    assert unreadable.value.code == "E203"


def test_a_checked_out_completion_holds_a_reference_and_the_object_all_of_it(payloads):
    whole = completion_of(1, body=BIG)
    light = check_out(whole, payloads)
    assert (light.body, light.body_bytes) == (b"", len(BIG))
    assert light.body_uri is not None
    assert load_body(str(light.body_uri), light.body_digest, payloads) == BIG
    # The object alone is enough to recover the outcome.
    frame = payloads.get(light.body_uri)
    assert frame is not None
    ((recovered,), bad) = decode_completions(frame)
    assert not bad
    assert recovered == whole.model_copy(update={"body_uri": light.body_uri})


def test_each_execution_of_an_attempt_keeps_an_object_of_its_own(payloads):
    first, second = (check_out(completion_of(1, body=body), payloads) for body in (b"1", b"2"))
    label = first.label
    others = [check_out(completion_of(1, label=f"{label}{digit}"), payloads) for digit in range(10)]
    found = list(find_outcomes(first.run_id, label, payloads))
    assert sorted(found, key=lambda each: str(each.body_digest)) == sorted(
        (first, second), key=lambda each: str(each.body_digest)
    )
    for completion, body in ((first, b"1"), (second, b"2")):
        assert load_body(str(completion.body_uri), completion.body_digest, payloads) == body
    assert payloads.delete_all(str(first.run_id)) == 2 + len(others)
    assert list(find_outcomes(first.run_id, label, payloads)) == []


def test_the_tokens_have_an_object_of_their_own_that_the_completion_names(payloads):
    whole = completion_of(1, body=BIG, tokens=b"ids", tokens_digest=digest_of(b"ids"))
    light = check_out(whole, payloads)
    assert (light.body, light.tokens, light.tokens_bytes) == (b"", b"", 3)
    assert light.tokens_uri is not None
    assert load_object(str(light.tokens_uri), light.tokens_digest, payloads) == b"ids"
    assert load_body(str(light.body_uri), light.body_digest, payloads) == BIG
    # A completion that is recovered from the store names its tokens, too.
    assert list(find_outcomes(light.run_id, light.label, payloads)) == [light]


def test_the_tokens_of_another_execution_are_not_read(payloads):
    first, second = (
        check_out(completion_of(1, tokens=ids, tokens_digest=digest_of(ids)), payloads)
        for ids in (b"1", b"2")
    )
    with pytest.raises(UnreadableBody, match="not the one that was accepted"):
        load_object(str(second.tokens_uri), first.tokens_digest, payloads)
    with pytest.raises(UnreadableBody, match="is gone"):
        load_object(payloads.uri("run/never.tokens"), None, payloads)


def test_objects_are_found_by_the_beginning_of_their_key(payloads):
    for key in ("run/00/a.1", "run/00/a.2", "run/00/ab.1", "run/a.3", "run2/00/a.1"):
        payloads.put(key, b"x")
    assert sorted(payloads.find("run/00/a.")) == [
        payloads.uri("run/00/a.1"),
        payloads.uri("run/00/a.2"),
    ]
    assert len(list(payloads.find("run/"))) == 4
    assert list(payloads.find("none/")) == []


def test_another_body_than_the_accepted_one_is_not_read(payloads):
    first, second = (check_out(completion_of(1, body=body), payloads) for body in (b"1", b"2"))
    with pytest.raises(UnreadableBody, match="not the one that was accepted") as damaged:
        load_body(str(second.body_uri), first.body_digest, payloads)
    assert damaged.value.code == "E207"
    uri = payloads.put("run/a.frame", b"no frame")
    with pytest.raises(UnreadableBody, match="no frame"):
        load_body(uri, None, payloads)


def test_a_body_too_large_for_a_message_travels_by_reference(broker_place, make_settings, tmp_path):
    settings = make_settings(broker_place, payloads={"url": (tmp_path / "p").as_uri()})
    store = open_payloads(settings)
    publisher = OutcomePublisher(broker_of(settings))
    publisher.send_completions([check_out(completion_of(1, body=BIG), store)])
    publisher.close()
    consumer = OutcomeConsumer(broker_of(settings))

    def arrived() -> Any:
        delivery = consumer.receive(most=1, linger_s=0, timeout_s=0.2)
        consumer.ack(delivery)
        return delivery.completions

    (found,) = wait_until(arrived)
    consumer.close()
    assert load_body(str(found.body_uri), found.body_digest, store) == BIG


def test_no_reference_leads_out_of_the_payload_folder(tmp_path):
    store = FolderPayloads(tmp_path / "payloads")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "payloads").mkdir()
    (tmp_path / "payloads" / "link").symlink_to(tmp_path / "secret")
    for uri in (
        (tmp_path / "secret").as_uri(),
        "file:///etc/passwd",
        store.uri("../secret"),
        store.uri("link"),
    ):
        with pytest.raises(ConfigError, match="not below the payload folder"):
            store.get(uri)


def test_a_folder_that_cannot_be_written_is_named_and_leaves_no_half_file(tmp_path):
    (tmp_path / "run").write_text("a file where a folder must be")
    store = FolderPayloads(tmp_path)
    with pytest.raises(ServiceUnavailable, match=r"could not be written below.*ROLLOUT_PAYLOADS"):
        store.put("run/a.frame", b"x")


def test_a_written_file_is_durable_with_the_folders_that_name_it(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def note(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr("pipeline.queue.payloads.os.fsync", note)
    FolderPayloads(tmp_path / "store").put("run/00/a.frame", b"x")
    assert synced[0].startswith(".writing-")
    assert synced[1:] == ["00", "run", "store"]


def test_a_write_that_fails_leaves_no_half_file(tmp_path, monkeypatch):
    store = FolderPayloads(tmp_path)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.queue.payloads.os.fsync", full_disk)
    with pytest.raises(ServiceUnavailable, match=r"No space left.*Free some space"):
        store.put("run/a.frame", b"x")
    assert [path for path in Path(tmp_path).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("url", ["http://x/y", "s3://", "folder"])
def test_a_payload_store_of_another_kind_is_refused(url, make_settings):
    with pytest.raises(ConfigError, match=r"ROLLOUT_PAYLOADS__URL"):
        open_payloads(make_settings(payloads={"url": url}))


def test_a_bucket_that_does_not_answer_is_named(make_settings):
    store = open_payloads(
        make_settings(
            payloads={"url": "s3://nowhere"}, aws={"s3_endpoint_url": "http://127.0.0.1:1"}
        )
    )
    with pytest.raises(ServiceUnavailable, match=r"nowhere does not answer"):
        store.put("a", b"x")
