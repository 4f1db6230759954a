"""Announcements of results: our own, S3's, and what is none."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from pipeline.contract.result_keys import ResultObject, announce, announced_results


def test_an_announcement_is_read_back():
    result = ResultObject("bucket", "exp/a b+c/é.json")
    assert announced_results(announce(result, at=datetime.now(UTC))) == [result]


def test_keys_of_s3s_own_notifications_are_unquoted():
    record = {
        "eventSource": "aws:s3",
        "s3": {"bucket": {"name": "b"}, "object": {"key": "exp/a+b%2Bc.json"}},
    }
    assert (
        announced_results(json.dumps({"Records": [record, record]}))
        == [ResultObject("b", "exp/a b+c.json")] * 2
    )


def test_s3s_test_event_announces_nothing():
    assert announced_results('{"Event": "s3:TestEvent", "Bucket": "b"}') == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no json",
        "[]",
        "7",
        "{}",
        '{"Records": 3}',
        '{"Records": [1]}',
        '{"Records": [{"s3": {"bucket": {"name": 1}, "object": {"key": "k"}}}]}',
        "[" * 100_000,
    ],
)
def test_foreign_messages_announce_no_object(body):
    with pytest.raises(ValueError, match=r"."):
        announced_results(body)
