"""A trainer that publishes each step, and rollouts that take three: what is trained, and wasted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
from fixtures.stored_run import StoredRun

from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.requests import request_of
from pipeline.store.capacity import first_not_admitted
from pipeline.store.engine import transact
from pipeline.store.rollouts import ClaimedAttempt, claim
from pipeline.store.runs import get_run
from pipeline.trainer.client import TrainerClient

GROUPS, N, STALENESS, STEPS, DURATION = 4, 2, 2, 30, 3
#: Attempts that the workers run at once.
SLOTS = 64
TOKENS = 100


class Fleet:
    """Workers whose rollouts take as long as some trainer steps."""

    def __init__(self, story: StoredRun, *, is_admitted: bool) -> None:
        self.story, self.is_admitted = story, is_admitted
        self.working: deque[tuple[int, int, ClaimedAttempt]] = deque()

    def dispatch(self, step: int) -> None:
        def work(connection):
            run = get_run(connection, self.story.run.slug)
            end = first_not_admitted(connection, run) if self.is_admitted else None
            room = SLOTS - len(self.working)
            return run, claim(connection, run, most=room, lease_s=60, end=end)

        run, claimed = transact(self.story.engine, work)
        versions = (request_of(run, each).policy_version for each in claimed)
        self.working += [(step, *pair) for pair in zip(versions, claimed, strict=True)]

    def finish(self, step: int) -> None:
        done: list[tuple[int, ClaimedAttempt]] = []
        while self.working and self.working[0][0] + DURATION <= step:
            done.append(self.working.popleft()[1:])
        self.story.record(*self.completions(done))

    def completions(self, done: Iterable[tuple[int, ClaimedAttempt]]):
        for version, each in done:
            reward = float(each.rollout_index)
            yield self.story.succeeded(
                each, reward, version_min=version, version_max=version, completion_tokens=TOKENS
            )


@pytest.mark.parametrize("is_admitted", [False, True], ids=["all at once", "admitted"])
def test_no_batch_is_too_old_and_admission_wastes_next_to_nothing(engine, is_admitted):
    bounds: dict[str, Any] = {"max_staleness": STALENESS, "groups_per_step": GROUPS}
    story = StoredRun(engine, prompts=400, n=N, **(bounds if is_admitted else {}))
    trainer = TrainerClient(engine, run=story.run.slug)
    spec = BatchSpec(groups=GROUPS, max_staleness=STALENESS)
    fleet = Fleet(story, is_admitted=is_admitted)
    trainer.publish_policy(0)
    version = waited = 0
    for tick in range(STEPS):
        fleet.dispatch(tick)
        fleet.finish(tick)
        try:
            batch = trainer.pull(version, spec, policy_version=version)
        except NotReady:
            waited += 1
            continue
        ages = {version - (each.version_min or 0) for each in batch.rollouts()}
        assert max(ages) <= STALENESS
        version += 1
        trainer.publish_policy(version)
    assert trainer.commit(version) == version * GROUPS
    stale = trainer.stats().drops.get("stale", 0)
    (spent,) = story.rows("SELECT sum(completion_tokens) AS n FROM attempts WHERE run_id = :run_id")
    share = stale / (stale + version * GROUPS)
    print(
        f"{'admitted' if is_admitted else 'all at once'}: {version} steps, {waited} ticks waited,"
        f" {stale} groups stale ({share:.0%}), {stale * N * TOKENS} of {spent['n']} tokens wasted"
    )
    assert version >= STEPS // 3
    if is_admitted:
        assert share < 0.05
    else:
        assert share > 0.3
