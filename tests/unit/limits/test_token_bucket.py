from hypothesis import given
from hypothesis import strategies as st

from pipeline.limits.token_bucket import TokenBucket

Calls = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0.001, 2)).map(lambda c: (round(c[0], 6), round(c[1], 6))),
    min_size=1,
    max_size=60,
)


@given(calls=Calls, tolerance_s=st.floats(0.1, 3))
def test_no_window_earns_less_than_it_spends(
    calls: list[tuple[float, float]], tolerance_s: float
) -> None:
    bucket, now, booked = TokenBucket(), 100.0, []
    for wait_s, cost_s in calls:
        now += wait_s
        at = bucket.earliest(cost_s, tolerance_s=tolerance_s, now=now)
        bucket.take(cost_s, at=at, tolerance_s=tolerance_s)
        booked.append((at, cost_s))
    booked.sort()
    # Seconds of earning that start in a window: its length, the savings, and one call too large.
    for first, (since, _) in enumerate(booked):
        spent = 0.0
        for at, cost_s in booked[first:]:
            spent += cost_s
            assert spent <= (at - since) + max(tolerance_s, max(c for _, c in booked)) + 1e-6


def test_a_new_bucket_has_saved_nothing_up() -> None:
    bucket = TokenBucket()
    slots = []
    for _ in range(4):
        slots.append(bucket.earliest(1.0, tolerance_s=10.0, now=0.0))
        bucket.take(1.0, at=slots[-1], tolerance_s=10.0)
    assert slots == [0.0, 1.0, 2.0, 3.0]


def test_an_idle_bucket_saves_up_its_burst_and_no_more() -> None:
    bucket = TokenBucket()
    bucket.take(1.0, at=0.0, tolerance_s=3.0)
    slots = []
    for _ in range(5):
        slots.append(bucket.earliest(1.0, tolerance_s=3.0, now=1000.0))
        bucket.take(1.0, at=slots[-1], tolerance_s=3.0)
    assert slots == [1000.0, 1000.0, 1000.0, 1001.0, 1002.0]


def test_after_a_pause_calls_start_at_the_steady_pace() -> None:
    bucket = TokenBucket()
    bucket.take(1.0, at=0.0, tolerance_s=5.0)
    bucket.empty(at=100.0, tolerance_s=4.0)
    assert bucket.earliest(1.0, tolerance_s=5.0, now=90.0) == 100.0
    bucket.take(1.0, at=100.0, tolerance_s=5.0)
    assert bucket.earliest(1.0, tolerance_s=5.0, now=90.0) == 101.0


def test_a_refund_lets_the_next_call_start_sooner() -> None:
    bucket = TokenBucket()
    bucket.take(5.0, at=0.0, tolerance_s=1.0)
    bucket.owe(-4.0)
    assert bucket.earliest(1.0, tolerance_s=1.0, now=0.0) == 1.0
