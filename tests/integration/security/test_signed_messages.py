"""With a shared key, what is not signed with it is refused on every broker, and kept aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.messages import completion_of, heartbeat_of, request_of
from fixtures.waiting import wait_until

from pipeline.contract.errors import UnreadableBody
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.claim_checks import check_out, load_body
from pipeline.queue.completions import Delivery, OutcomeConsumer, OutcomePublisher
from pipeline.queue.frames import decode_completions
from pipeline.queue.payloads import open_payloads
from pipeline.queue.requests import RequestPublisher
from pipeline.queue.signing import COMPLETION, HEARTBEAT, Forged, Signer

KEY = {"signing_key": "a key that all processes share"}
OTHER_KEY = {"signing_key": "a key that nobody shares"}

SettingsMaker = Callable[..., Any]


def receive(broker: Broker, count: int) -> Delivery:
    """Read `count` messages as a collector of this broker would."""
    whole = Delivery()
    consumer = OutcomeConsumer(broker)

    def enough() -> bool:
        delivery = consumer.receive(most=256, linger_s=0.05, timeout_s=0.2)
        for name in ("completions", "heartbeats", "malformed", "messages"):
            getattr(whole, name).extend(getattr(delivery, name))
        consumer.ack(delivery)
        return len(whole.messages) >= count

    try:
        wait_until(enough, 20, seen=lambda: whole)
    finally:
        consumer.close()
    return whole


def send(broker: Broker) -> None:
    publisher = OutcomePublisher(broker)
    publisher.send_completions([completion_of(1), completion_of(2)])
    publisher.send_heartbeat(heartbeat_of())
    publisher.close()


def test_signed_messages_arrive_whole(broker_place, make_settings):
    broker = broker_of(make_settings(broker_place, broker=KEY))
    send(broker)
    delivery = receive(broker, 2)
    assert delivery.completions == [completion_of(1), completion_of(2)]
    assert [beat.worker_id for beat in delivery.heartbeats] == [heartbeat_of().worker_id]
    assert delivery.malformed == []


@pytest.mark.parametrize("theirs", [{}, OTHER_KEY], ids=["unsigned", "another key"])
def test_what_is_not_signed_with_our_key_is_refused(broker_place, make_settings, theirs):
    send(broker_of(make_settings(broker_place, broker=theirs)))
    delivery = receive(broker_of(make_settings(broker_place, broker=KEY)), 2)
    assert (delivery.completions, delivery.heartbeats) == ([], [])
    assert [kind for kind, *_ in delivery.malformed] == ["forged", "forged"]
    word = "another key" if theirs else "not signed"
    assert all(word in reason for _, reason, _ in delivery.malformed)


def test_without_a_key_signed_messages_are_read_too(broker_place, make_settings):
    send(broker_of(make_settings(broker_place, broker=KEY)))
    delivery = receive(broker_of(make_settings(broker_place)), 2)
    assert len(delivery.completions) == 2
    assert len(delivery.heartbeats) == 1


def test_a_changed_body_and_a_wrong_purpose_are_forged():
    signer = Signer(b"key")
    sealed = signer.seal(b"reward=0", COMPLETION)
    assert signer.open(sealed, COMPLETION) == b"reward=0"
    for data, purpose in (
        (sealed.replace(b"0", b"1"), COMPLETION),
        (sealed, HEARTBEAT),
        (sealed[:20], COMPLETION),
        (b"", COMPLETION),
    ):
        with pytest.raises(Forged) as forged:
            signer.open(data, purpose)
        assert forged.value.code == "E304"
    signer.check("message", signer.signature("message", COMPLETION), COMPLETION)
    for signature in ("", "ä", signer.signature("message", HEARTBEAT)):
        with pytest.raises(Forged):
            signer.check("message", signature, COMPLETION)


def test_an_object_that_somebody_else_wrote_is_not_believed(make_settings, tmp_path):
    settings = make_settings(broker=KEY)
    payloads = open_payloads(settings)
    claimed = check_out(completion_of(body=b"trajectory"), payloads)
    assert claimed.body_uri is not None
    assert load_body(claimed.body_uri, claimed.body_digest, payloads) == b"trajectory"
    path = Path(claimed.body_uri.removeprefix("file://"))
    forged = path.read_bytes().replace(b"trajectory", b"tra-jector")
    path.write_bytes(forged)
    with pytest.raises(UnreadableBody, match="another key"):
        load_body(claimed.body_uri, claimed.body_digest, payloads)
    assert decode_completions(forged)[0], "whoever has no key does not check"


def test_a_forged_request_touches_no_rollout_and_is_kept(deploy, redis_place: BrokerPlace):
    deployment = deploy(redis_place, broker=KEY, llm={"base_url": "http://127.0.0.1:9/v1"})
    deployment.submit(1)
    deployment.start_controller()
    deployment.start_worker()
    wait_until(lambda: len(deployment.said("started")) == 1, 30, seen=deployment.picture)
    (attempt,) = deployment.rows(
        "SELECT a.*, group_id FROM attempts a JOIN rollouts USING (rollout_id)"
    )
    forged = request_of(
        rollout_id=attempt["rollout_id"],
        run_id=attempt["run_id"],
        group_id=attempt["group_id"],
        agent="nobody",
    )
    unsigned = broker_of(
        deployment.settings.model_copy(
            update={"broker": deployment.settings.broker.model_copy(update={"signing_key": None})}
        )
    )
    publisher = RequestPublisher(unsigned, expires_s=60)
    publisher.publish([forged], queue="rollouts")
    publisher.stop_attempts(deployment.said("started"))
    publisher.close()
    (letter,) = wait_until(
        lambda: deployment.rows("SELECT * FROM dead_letters"), 30, seen=deployment.picture
    )
    assert letter["kind"] == "request"
    assert "is not signed" in letter["reason"]
    assert deployment.states() == {"running": 1}
    deployment.gate.touch()
    deployment.wait_states({"succeeded": 1})
    assert deployment.said("stopped") == [], "nor was it stopped by a forged command"
    assert len(deployment.rows("SELECT * FROM attempts")) == 1
