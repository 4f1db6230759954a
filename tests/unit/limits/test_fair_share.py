import pytest

from pipeline.limits.fair_share import FairShare, Flow


def serve(share: FairShare, flows: dict[Flow, float], rounds: int) -> dict[Flow, int]:
    """Serve whoever is least, as the ledgers do; all keep waiting."""
    served = dict.fromkeys(flows, 0)
    for flow, weight in flows.items():
        share.tell(flow, weight=weight, waiting=5)
    for _ in range(rounds):
        flow = min(flows, key=share.tag)
        share.charge(flow, 1.0)
        share.advance()
        served[flow] += 1
    return served


def test_runs_are_served_by_weight_however_many_workers_they_have() -> None:
    flows = {("a", "p1"): 3.0, ("b", "p1"): 1.0, ("b", "p2"): 1.0, ("b", "p3"): 1.0}
    served = serve(FairShare(), flows, 1200)
    of_b = sum(count for (run, _), count in served.items() if run == "b")
    assert served["a", "p1"] / of_b == pytest.approx(3, rel=0.02)
    assert served["b", "p1"] == pytest.approx(served["b", "p3"], abs=2)


def test_a_run_that_was_idle_is_owed_nothing() -> None:
    share = FairShare()
    serve(share, {("a", "p"): 1.0}, 1000)
    served = serve(share, {("a", "p"): 1.0, ("b", "p"): 1.0}, 100)
    assert served["b", "p"] == pytest.approx(50, abs=2)


def test_a_run_that_stops_waiting_for_a_moment_keeps_its_lead() -> None:
    share = FairShare()
    serve(share, {("a", "p"): 1.0, ("b", "p"): 1.0}, 2)
    share.charge(("a", "p"), 10.0)
    share.tell(("a", "p"), weight=1.0, waiting=0)
    share.forget_overtaken()
    share.tell(("a", "p"), weight=1.0, waiting=1)
    assert share.tag(("a", "p")) - share.tag(("b", "p")) == pytest.approx(10.0)


def test_what_left_leaves_nothing_behind() -> None:
    share = FairShare()
    for index in range(100):
        serve(share, {(f"run{index}", "p"): 1.0}, 3)
        share.leave((f"run{index}", "p"))
        share.tell(("last", "p"), weight=1.0, waiting=1)
        share.charge(("last", "p"), 3.5)
        share.advance()
        share.forget_overtaken()
    assert len(share._idle) <= 2
    assert set(share._runs) == {"last"}
