"""Real worker processes under one limit: rate, weights of tokens, shares, back-off, changes."""

import asyncio
import time

import pytest
from fixtures.speed import at_least, at_most, one_of_three

from benchmarks.limit_fleet import Fleet

pytestmark = pytest.mark.timeout(60)


def hungry(callers: int = 40, **run: object) -> list[dict]:
    return [{"run": "r", "callers": callers, "hold_s": 0.02, **run}]


@one_of_three
async def test_three_processes_get_the_limit_and_never_more(fleet: Fleet) -> None:
    await fleet.limit(requests_per_minute=12_000, burst=40)
    await fleet.start(hungry(), hungry(), hungry(), seconds=6)
    report = await fleet.report()

    rate = report.between(fleet.since + 0.5, fleet.since + 5.5) / 5
    most, cost = report.most_in_a_second(), report.calls / len(report.grants)
    print(f"\nrate {rate:.1f}/s of 200, most in a second {most}, calls per grant {cost:.2f}")
    at_most(rate, 200)
    assert most <= 200 + 40
    at_least(rate, 0.95 * 200)
    at_least(min(report.by_process), 0.8 * max(report.by_process))
    at_most(cost, 1.3)


@one_of_three
async def test_tokens_are_limited_by_their_weight(fleet: Fleet) -> None:
    await fleet.limit(tokens_per_minute=1_200_000, token_burst=2_000)
    runs = [[{"run": f"r{t}", "callers": 40, "tokens": t, "hold_s": 0.02}] for t in (50, 100, 200)]
    await fleet.start(*runs, seconds=4.5)
    report = await fleet.report()

    rate = report.tokens_between(fleet.since + 0.5, fleet.since + 4) / 3.5
    most, cost = report.most_in_a_second(tokens=True), report.calls / len(report.grants)
    print(f"\ntokens {rate:.0f}/s of 20000, most in a second {most}, calls per grant {cost:.2f}")
    at_most(rate, 20_000)
    assert most <= 20_000 + 2_000
    at_least(rate, 0.95 * 20_000)
    at_most(cost, 1.3)


@one_of_three
async def test_a_call_below_the_limit_costs_about_one_call_of_redis(fleet: Fleet) -> None:
    await fleet.limit(requests_per_minute=12_000)
    await fleet.start(*[hungry(10, think_s=0.2)] * 3, seconds=4)
    report = await fleet.report()

    cost = report.calls / len(report.grants)
    print(f"\n{len(report.grants) / 4:.0f} calls/s below the limit, {cost:.2f} calls per grant")
    at_most(cost, 1.3)


@one_of_three
async def test_runs_share_by_weight_while_they_contend(fleet: Fleet) -> None:
    await fleet.limit(requests_per_minute=12_000, burst=40)
    both = [{"run": "three", "weight": 3.0, "callers": 30}, {"run": "one", "callers": 30}]
    await fleet.start(both, both, [{"run": "one", "callers": 60}], seconds=4.5)
    report = await fleet.report()

    window = fleet.since + 0.5, fleet.since + 4.5
    three, one = (report.between(*window, run) for run in ("three", "one"))
    print(f"\n3:1 by weight gave {three / one:.2f}, together {(three + one) / 4:.1f}/s of 200")
    at_least((three + one) / 4, 0.95 * 200)
    at_least(three / one, 2.6)
    at_most(three / one, 3.4)


@one_of_three
async def test_a_run_alone_gets_what_others_leave(fleet: Fleet) -> None:
    await fleet.limit(requests_per_minute=12_000, burst=40)
    modest = [{"run": "modest", "weight": 9.0, "callers": 2, "think_s": 0.2}]
    await fleet.start(modest, hungry(60), seconds=4)
    report = await fleet.report()

    at_least(report.between(fleet.since + 1, fleet.since + 4) / 3, 0.95 * 200)


@one_of_three
async def test_calls_in_flight_never_exceed_the_cap(fleet: Fleet) -> None:
    await fleet.limit(max_concurrency=12)
    await fleet.start(*[hungry(20, hold_s=0.1)] * 3, seconds=4)
    report = await fleet.report()

    rate = report.between(fleet.since + 1, fleet.since + 4) / 3
    cost = report.calls / len(report.grants)
    print(f"\n{rate:.0f}/s of 120 at 12 in flight, {cost:.2f} calls per grant, {report.by_process}")
    assert report.most_in_flight() <= 12
    at_least(rate, 0.75 * 120)
    at_least(min(report.by_process), 0.5 * max(report.by_process))
    at_most(cost, 1.5)


@one_of_three
async def test_a_429_seen_by_one_process_holds_all(fleet: Fleet) -> None:
    await fleet.limit(requests_per_minute=12_000, burst=40)
    await fleet.start(hungry(), hungry(), seconds=4.5, note_after_s=1.5, retry_after_s=1.5)
    report = await fleet.report()

    noted_at = fleet.since + 1.5
    during = report.between(noted_at + 0.2, noted_at + 1.5)
    most_after = report.most_in_a_second()
    print(f"\n{during} calls during the back-off, most in a second {most_after}")
    at_most(during, 0)
    assert most_after <= 200 + 40
    at_least(report.between(noted_at + 1.5, noted_at + 2.5), 0.9 * 200)


@one_of_three
async def test_a_new_limit_is_followed_by_running_processes(fleet: Fleet) -> None:
    await fleet.limit()
    await fleet.start(hungry(10), hungry(10), seconds=7)
    await asyncio.sleep(max(0.0, fleet.since + 1 - time.monotonic()))
    await fleet.limit(requests_per_minute=6_000, burst=10)
    first = time.monotonic()
    await asyncio.sleep(3)
    await fleet.limit(requests_per_minute=1_800, burst=10)
    second = time.monotonic()
    report = await fleet.report()

    # A process that the machine kept from asking follows a little later than within a second.
    at_most(report.between(first + 2, second), 100 * (second - first - 2) + 10)
    at_most(report.between(second + 1.5, second + 2.5), 30 + 10)
    at_least(report.between(fleet.since, first) / (first - fleet.since), 120)


@one_of_three
async def test_units_of_a_killed_process_return(fleet: Fleet) -> None:
    await fleet.limit(max_concurrency=5)
    await fleet.start(hungry(5, hold_s=60), hungry(5, hold_s=0.05), seconds=6, lease_s=1.0)
    greedy, other = fleet.processes
    await asyncio.sleep(max(0.0, fleet.since + 1.0 - time.monotonic()))
    status = (await fleet.store.show())[0]
    assert status.in_flight == 5
    greedy.kill()
    killed_at = time.monotonic()
    await greedy.wait()
    fleet.processes = [other]
    report = await fleet.report()

    # Until the lease has run out the units count as used; then all five are free again.
    later = [g[0] for g in report.grants if g[0] > killed_at]
    print(f"\nfirst call {later[0] - killed_at:.2f} s after the kill, lease 1 s")
    assert report.most_in_flight() <= 5
    assert later[0] - killed_at >= 0.5
    at_most(later[0] - killed_at, 2.5)
    at_least(report.between(killed_at + 2.5, killed_at + 4.5), 0.6 * 5 / 0.05 * 2)
