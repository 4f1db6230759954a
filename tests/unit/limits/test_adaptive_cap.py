import pytest

from pipeline.limits.concurrency import START, AdaptiveCap
from pipeline.limits.ledger import Outcomes
from pipeline.limits.settings import LimitSettings

ADAPTIVE = LimitSettings(adaptive=True).pace()


def learn(cap: AdaptiveCap, now: float, *, ok: int = 0, congested: int = 0, s: float = 1.0) -> int:
    before = cap.in_force(ADAPTIVE)
    cap.learn(Outcomes(ok, congested, ok * s), pace=ADAPTIVE, in_flight=before, now=now)
    return cap.in_force(ADAPTIVE)


def test_a_fixed_cap_stays() -> None:
    pace = LimitSettings(max_concurrency=9).pace()
    cap = AdaptiveCap()
    cap.learn(Outcomes(0, 5, 0.0), pace=pace, in_flight=9, now=0.0)
    assert cap.in_force(pace) == 9


def test_the_cap_doubles_per_round_until_it_first_shrinks() -> None:
    cap = AdaptiveCap()
    assert learn(cap, 0.0, ok=int(START)) == 2 * START
    assert learn(cap, 1.0, congested=1) == int(2 * START * 0.7)
    before = cap.cap
    learn(cap, 3.0, ok=int(before))
    assert cap.cap == pytest.approx(before + 1, abs=0.1)


def test_a_burst_of_429_shrinks_the_cap_once_per_round() -> None:
    cap = AdaptiveCap()
    learn(cap, 0.0, ok=1, s=2.0)
    after = learn(cap, 1.0, congested=1)
    assert [learn(cap, 1.0 + t / 10, congested=5) for t in range(19)] == [after] * 19
    assert learn(cap, 3.1, congested=1) < after


def test_the_cap_does_not_grow_while_it_is_not_used() -> None:
    cap = AdaptiveCap()
    cap.learn(Outcomes(10, 0, 10.0), pace=ADAPTIVE, in_flight=5, now=0.0)
    assert cap.in_force(ADAPTIVE) == START


def test_grown_latency_shrinks_the_cap() -> None:
    cap, now = AdaptiveCap(), 0.0
    for _ in range(20):
        now += 1.1
        learn(cap, now, ok=10, s=1.0)
    before = cap.cap
    for _ in range(3):
        now += 5.0
        learn(cap, now, ok=10, s=4.0)
    assert cap.cap < before


def test_the_cap_never_leaves_its_bounds() -> None:
    pace = LimitSettings(adaptive=True, max_concurrency=30).pace()
    cap = AdaptiveCap()
    for now in range(100):
        cap.learn(Outcomes(1000, 0, 1000.0), pace=pace, in_flight=30, now=float(now * 10))
    assert cap.in_force(pace) == 30
    for now in range(100, 200):
        cap.learn(Outcomes(0, 9, 0.0), pace=pace, in_flight=30, now=float(now * 10))
    assert cap.in_force(pace) == 1
