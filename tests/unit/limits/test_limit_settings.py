import pytest
from pydantic import ValidationError

from pipeline.limits.settings import LimitSettings


def test_nothing_set_is_unlimited() -> None:
    assert LimitSettings().is_unlimited
    assert not LimitSettings().pace().is_rated
    assert not LimitSettings(adaptive=True).is_unlimited


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "max_concurrency"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_limit_below_one_is_refused(name: str, number: int) -> None:
    with pytest.raises(ValidationError):
        LimitSettings.model_validate({name: number})


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ValidationError):
        LimitSettings.model_validate({"requests_per_second": 1})


@pytest.mark.parametrize(("per_minute", "burst"), [(12_000, None), (12_000, 20), (60, 1), (7, 3)])
def test_savings_and_lateness_together_stay_within_the_burst(
    per_minute: int, burst: int | None
) -> None:
    pace = LimitSettings(requests_per_minute=per_minute, burst=burst).pace()
    most = burst or per_minute / 60
    savings = pace.request_tolerance_s / pace.request_interval_s
    assert savings >= 1 - 1e-9
    assert savings + pace.late_s / pace.request_interval_s <= most + 1.01


def test_calls_are_paced_a_little_below_the_limit() -> None:
    pace = LimitSettings(requests_per_minute=6_000, tokens_per_minute=60_000).pace()
    assert 0.98 <= 0.01 / pace.request_interval_s <= 0.995
    assert 0.98 <= 0.001 / pace.token_interval_s <= 0.995
