"""One base URL or several, however they are written."""

from __future__ import annotations

import pytest
from fixtures.messages import request_of
from pydantic import ValidationError

from pipeline.contract.base_urls import may_call, urls_of, without_credentials
from pipeline.contract.messages import RolloutRequest, parse_message
from pipeline.contract.run import RunConfig

A, B = "http://a:8000/v1", "http://b:8000/v1"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ("", None),
        ([], None),
        (A, A),
        ([A], A),
        (f"{A}, {B}", (A, B)),
        (f'["{A}", "{B}"]', (A, B)),
        ([A, B, A], (A, B)),
    ],
)
def test_one_stays_one_and_several_are_a_list(given, kept):
    config = RunConfig.model_validate({"base_url": given})
    assert config.base_url == kept
    assert RunConfig.stored(config.model_dump(mode="json")) == config


def test_a_request_carries_all_of_them():
    request = request_of(base_url=(A, B))
    sent = request.model_dump_json()
    assert urls_of(parse_message(RolloutRequest, sent).base_url) == (A, B)


def test_none_of_several_carries_credentials():
    with pytest.raises(ValidationError, match="no credentials"):
        RunConfig(base_url=(A, "http://me:pw@b/v1"))


def test_what_is_announced_is_enough_to_judge_by_and_no_secret():
    announced = without_credentials("https://me:pw@Models.example/v1")
    assert "pw" not in announced
    assert may_call("https://models.example/v1/", [announced])
    assert not may_call("https://models.example:444/v1", [announced])
    assert may_call("http://127.0.0.1:9/v1", [])
