"""The standard error of a mean reward: clustered by prompt, kept by triggers, on values by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from alembic import command
from alembic.config import Config
from fixtures.stored_run import StoredRun, payload
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.store.accounting import check_accounting
from pipeline.store.engine import transact
from pipeline.store.prompts import PromptSource, add_prompts, seal_run
from pipeline.store.schema import MIGRATIONS
from pipeline.store.status import RunStatus, run_status


def status_of(story: StoredRun) -> RunStatus:
    return transact(story.engine, lambda c: run_status(c, story.run))


def rewarded(engine: Engine, by_prompt: Sequence[Sequence[float]]) -> StoredRun:
    """A run with these rewards, by prompt; what is missing to the longest one failed."""
    n = max(map(len, by_prompt))
    story = StoredRun(engine, prompts=len(by_prompt), n=n, n_min=1, max_attempts=1)
    story.record(
        *(
            story.succeeded(attempt, by_prompt[attempt.group_no][attempt.rollout_index])
            if attempt.rollout_index < len(by_prompt[attempt.group_no])
            else story.failed(attempt, ErrorClass.CONTRACT)
            for attempt in story.claim()
        )
    )
    return story


@pytest.mark.parametrize(
    ("by_prompt", "stderr"),
    [
        # The mean is 1/2; the residuals of the prompts sum up to 1 and -1: sqrt(2/1 * 2) / 4.
        pytest.param([[1, 1], [0, 0]], 0.5, id="alike within a prompt"),
        # Residual sums 0 and 0.
        pytest.param([[1, 0], [1, 0]], 0.0, id="all prompts alike"),
        # Residual sums 2 - 3/2 and 0 - 1/2: sqrt(2/1 * 1/2) / 4.
        pytest.param([[1, 0, 1], [0]], 0.25, id="prompts of different size"),
        # The ordinary one: sample variance 1/3 of 3 rewards, sqrt(1/9).
        pytest.param([[1], [0], [0]], 1 / 3, id="one rollout a prompt"),
        pytest.param([[0.1] * 4, [0.1] * 4, [0.1] * 3], 0.0, id="equal rewards"),
        pytest.param([[1, 0, 1]], None, id="a single prompt says nothing of others"),
    ],
)
def test_the_standard_error_is_clustered_by_prompt(engine: Engine, by_prompt, stderr):
    story = rewarded(engine, by_prompt)
    found = status_of(story)
    assert found.reward_stderr == (None if stderr is None else pytest.approx(stderr, abs=1e-12))
    assert found.reward_prompts == len(by_prompt)
    assert found.to_json()["reward"]["stderr"] == found.reward_stderr
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def test_a_row_enqueued_in_two_epochs_is_one_prompt(engine: Engine):
    story = StoredRun(engine, prompts=2, n=1, n_min=1)

    def add(connection) -> None:
        rows = [(row_no, payload(row_no)) for row_no in range(2)]
        add_prompts(connection, story.run, PromptSource("numbers", epoch=1), rows)
        seal_run(connection, story.run)

    transact(engine, add)
    story.record(*(story.succeeded(a, float(a.group_no % 2)) for a in story.claim()))
    found = status_of(story)
    assert (found.reward_n, found.reward_prompts) == (4, 2)
    assert found.reward_stderr == pytest.approx(0.5), "and not 0.29, as of four prompts"


def test_an_older_store_with_a_run_in_flight_is_counted_and_goes_on(engine: Engine):
    story = StoredRun(engine, prompts=3, n=2, n_min=1)
    claimed = story.claim()
    rewards = [1.0, 1.0, 0.0, 0.5, 0.0, 1.0]
    story.record(*(story.succeeded(a, r) for a, r in zip(claimed[:3], rewards[:3], strict=True)))
    before = status_of(story)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0004-1")
        assert story.rows("SELECT to_regclass('reward_tallies') AS table") == [{"table": None}]
        command.upgrade(config, "head")
    found = status_of(story)
    assert (found.reward_n, found.reward_prompts) == (3, 2)
    assert found.scores == before.scores
    assert [(score.name, score.n) for score in found.scores] == [("numeric", 3)]
    # The mean is 2/3, the residual sums are 2/3 and -2/3: sqrt(2/1 * 8/9) / 3.
    assert found.reward_stderr == pytest.approx(4 / 9)
    story.record(*(story.succeeded(a, r) for a, r in zip(claimed[3:], rewards[3:], strict=True)))
    # The mean is 7/12, the residual sums are 5/6, -2/3 and -1/6: sqrt(3/2 * 7/6) / 6.
    assert status_of(story).reward_stderr == pytest.approx((7 / 4) ** 0.5 / 6)
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []
