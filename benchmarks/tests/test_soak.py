"""A long run in ten parts: which samples count where, and when memory is flat."""

import pytest

from benchmarks import report
from benchmarks.soak import Soak, memory_by_part

MIB = 2**20


def soak(**memory: list[float]) -> Soak:
    in_bytes = {name.replace("_", "-"): [x * MIB for x in held] for name, held in memory.items()}
    return Soak("W0", 50_000, 50_000, 150.0, in_bytes)


def test_a_tenth_is_the_median_of_the_samples_that_were_taken_in_it():
    samples = [(finished, {"worker-0": finished}) for finished in range(0, 101, 2)]
    assert memory_by_part(samples, total=100) == {
        "worker-0": [4, 14, 24, 34, 44, 54, 64, 74, 84, 95]
    }


def test_a_run_too_short_to_judge_is_refused():
    with pytest.raises(ValueError, match="take more rollouts"):
        memory_by_part([(0, {"worker-0": 1}), (99, {"worker-0": 1})], total=100)


def test_warming_up_is_no_growth():
    assert soak(controller=[50, *[100] * 9], worker_0=[60, 100, *[109] * 8]).is_flat


@pytest.mark.parametrize("grown", ["controller", "worker_0", "worker_1"])
def test_one_process_that_grows_is_enough(grown):
    memory = {name: [100.0] * 10 for name in ("controller", "worker_0", "worker_1")}
    assert not soak(**{**memory, grown: [100.0] * 9 + [111.0]}).is_flat


def test_the_broker_may_grow_and_is_shown():
    found = soak(controller=[100] * 10, worker_0=[100] * 10, redis=[10] * 9 + [30])
    assert found.is_flat
    assert "| redis" in report.soak_table(found)
    assert "3.000" in report.soak_table(found)
