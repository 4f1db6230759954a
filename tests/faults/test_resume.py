"""A killed worker costs the calls under way, not the rollouts: C1 with journals."""

from collections.abc import Iterator

import pytest
from fixtures.brokers import missing

from benchmarks.faults.deployment import Deployment
from benchmarks.faults.resume import run_trial, trial_size
from benchmarks.faults.servers import BrokerMissing
from faults.conftest import BROKERS, make_deployment

TURNS = 10
#: A worker is killed when its rollouts are at half of their calls, and again before their end.
KILL_EVERY_CALLS = 75
#: The goal on a quiet machine is 1.2: the call under way, and what is not sent yet. A busy machine
#: delays frames; without journals a lost attempt costs five calls and more.
MOST_CALLS_PER_LOSS = 3.0


@pytest.fixture(params=BROKERS)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    size = trial_size(in_flight=16, workers=2, turns=TURNS, latency_ms=800.0, after_s=0.0)
    try:
        with make_deployment(request.param, size) as made:
            yield made
    except BrokerMissing as error:
        missing(str(error))


def test_calls_of_killed_workers_are_replayed(deployment: Deployment):
    found = run_trial(deployment, groups=2, kill_every_calls=KILL_EVERY_CALLS, most_kills=2)
    print(found)
    assert found.violations == ()
    assert found.unequal == 0
    assert found.lost_attempts > 0
    assert found.replayed > 0
    assert found.calls_per_loss <= MOST_CALLS_PER_LOSS
