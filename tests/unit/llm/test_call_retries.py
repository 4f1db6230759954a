from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.llm.call_errors import retry_after_s
from workers.llm.call_retries import CallRetryPolicy

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Sun, 01 Mar 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after_s(headers, now=NOW) == seconds


@given(
    retry=st.integers(1, 200),
    asked=st.none() | st.floats(0, 1e6),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_a_delay_is_bounded_and_never_below_what_was_asked(
    retry: int, asked: float | None, jitter: float
) -> None:
    policy = CallRetryPolicy()
    delay_s = policy.delay_s(retry, asked, jitter)
    if asked is None:
        assert 0 <= delay_s <= policy.max_s
    else:
        assert asked <= delay_s <= asked + policy.max_s


def test_the_backoff_doubles() -> None:
    policy = CallRetryPolicy(base_s=0.5, max_s=30)
    assert [policy.delay_s(retry, None, 1.0) for retry in range(1, 9)] == [
        0.5,
        1,
        2,
        4,
        8,
        16,
        30,
        30,
    ]
