"""A prompt that fits into no message fails alone, with a code, and holds up nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fixtures.brokers import BrokerPlace
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.dispatcher import Dispatcher
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher
from pipeline.store.engine import transact
from pipeline.store.prompts import PromptSource, add_prompts


def test_a_prompt_too_large_for_the_broker_fails_alone_and_says_so(
    engine: Engine, redis_place: BrokerPlace, make_settings: Callable[..., Any]
):
    story = StoredRun(engine, prompts=1)
    rows = [(number, {"prompt": "x" * size}) for number, size in ((1, 9000), (2, 10))]
    transact(engine, lambda c: add_prompts(c, story.run, PromptSource("sizes"), rows))
    settings = make_settings(redis_place)
    narrow = replace(broker_of(settings), most_bytes=5000)
    dispatcher = Dispatcher(engine, RequestPublisher(narrow, expires_s=60), settings)
    try:
        dispatcher.step()
        with broker_of(settings).connect() as connection:
            assert narrow.depth(connection, "rollouts") == 2
    finally:
        dispatcher.close()
    first, large, last = story.rollouts()
    assert (first["state"], last["state"]) == ("dispatched", "dispatched")
    assert (large["state"], large["reward"], large["error_class"]) == ("failed", None, "contract")
    (attempt,) = story.rows("SELECT * FROM attempts WHERE state = 'failed'")
    assert attempt["error_code"] == "request_too_large"
    assert "Shorten it" in attempt["error_message"]
