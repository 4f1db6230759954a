"""A trainer may die anywhere in a step: nothing is trained twice, and nothing is left out. C14."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults import trainer
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.histories import read_history
from benchmarks.faults.runs import FaultRun
from benchmarks.faults.trainer_lives import EVERY_PLACE, TrainerLives
from faults.rules import judge

CONSUMERS = ("left", "right")


# A trainer uses no broker.
@pytest.mark.parametrize("deployments", ["redis"], indirect=True)
def test_a_trainer_that_dies_anywhere_trains_each_group_once(
    deployment: Deployment, tmp_path: Path
):
    run = FaultRun(deployment, groups=24, name="trained", n=2)
    trainers = [
        TrainerLives(deployment, run.slug, consumer, tmp_path / consumer, groups=2)
        for consumer in CONSUMERS
    ]
    for each in trainers:
        each.start()
    for each in trainers:
        each.join(100)
        assert each.failure is None, each.failure
    judge(run)
    lineages = [trainer.read_checkpoint(each.checkpoint) for each in trainers]
    trained = Counter(group for steps in lineages for groups in steps.values() for group in groups)
    assert set(trained.values()) == {1}, "a group was trained twice"
    consumed = {str(g["group_id"]) for g in run.evidence().groups if g["state"] == "consumed"}
    assert set(trained) == consumed
    assert len(consumed) == run.groups
    assert sum(each.deaths for each in trainers) >= len(EVERY_PLACE)
    require_same_batch_per_step(deployment, consumed)


def require_same_batch_per_step(deployment: Deployment, groups: set[str]) -> None:
    """A step that was pulled again gave the same groups in the same order."""
    pulled: dict[tuple[str, int], list[str]] = {}
    replayed = 0
    for line in read_history(deployment.histories, trainer.ACTOR):
        if groups.issuperset(line["groups"]):
            key = line["consumer"], line["step"]
            assert pulled.setdefault(key, line["groups"]) == line["groups"]
            replayed += line["replayed"]
    assert replayed > 0
