"""Random histories: duplicated, reordered, lost and late messages, crashes before a commit.

Hypothesis plays dispatcher, workers, broker, collector and reconciler against the real store.
Whatever it does, the invariants hold after every step, and in the end every rollout is decided.
"""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import Completion
from pipeline.contract.rollout import (
    ATTEMPT_TRANSITIONS,
    GROUP_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    TERMINAL_ROLLOUT_STATES,
    AttemptState,
    GroupState,
    RolloutState,
)
from pipeline.store.accounting import check_accounting
from pipeline.store.outcomes import record_outcomes
from pipeline.store.rollouts import ClaimedAttempt, claim

ERRORS = [
    ErrorClass.MODEL_TRANSPORT,
    ErrorClass.MODEL_RATE_LIMIT,
    ErrorClass.MODEL_BAD_REQUEST,
    ErrorClass.WORKER_STOPPED,
    ErrorClass.AGENT_TIMEOUT,
]
#: Reasons of moves that spend one of the attempts, or count as a loss.
COUNTED = {"succeeded", "model_transport", "model_bad_request", "agent_timeout"}
LOST = {"worker_lost", "poison"}
TERMINAL = {str(state) for state in TERMINAL_ROLLOUT_STATES}
WORST_ATTEMPTS = 60


class History(RuleBasedStateMachine):
    """One run; `said` is all that workers ever sent: the broker may bring any of it, any time."""

    engine: Engine

    @initialize(
        prompts=st.integers(1, 3),
        n=st.integers(1, 3),
        max_attempts=st.integers(1, 3),
        max_lost=st.integers(1, 3),
        n_min=st.integers(0, 3),
        is_remote=st.booleans(),
    )
    def begin(
        self, prompts: int, n: int, max_attempts: int, max_lost: int, n_min: int, is_remote: bool
    ) -> None:
        #: Whether attempts are sessions whose trajectories a later attempt scores.
        self.is_remote = is_remote
        self.story = StoredRun(
            self.engine,
            prompts=prompts,
            n=n,
            n_min=min(n, n_min),
            max_attempts=max_attempts,
            max_lost=max_lost,
            backoff_max_s=0.0,
        )
        self.working: list[ClaimedAttempt] = []
        self.said: list[Completion] = []
        self.accepted: dict[Any, tuple[Any, ...]] = {}
        self.attempts: dict[Any, AttemptState] = {}

    @rule(most=st.integers(1, 5))
    def dispatch(self, most: int) -> None:
        self.working += self.story.claim(most)

    @rule(data=st.data())
    def dispatch_and_crash(self, data: st.DataObject) -> None:
        with self.engine.connect() as connection:
            claim(connection, self.story.run, most=data.draw(st.integers(1, 3)), lease_s=60)
            connection.rollback()

    @precondition(lambda self: self.working)
    @rule(data=st.data(), error=st.none() | st.sampled_from(ERRORS), reward=st.floats(-1, 1))
    def a_worker_ends_an_attempt(
        self, data: st.DataObject, error: ErrorClass | None, reward: float
    ) -> None:
        attempt = self.working.pop(data.draw(st.integers(0, len(self.working) - 1)))
        body = f"{attempt.rollout_id} {attempt.unscored_no or attempt.attempt_no}".encode()
        if error is None and self.is_remote and attempt.unscored_no is None:
            self.said.append(self.story.succeeded(attempt, None, body=body, purpose="unscored"))
        elif error is None:
            self.said.append(self.story.succeeded(attempt, reward, body=body))
        else:
            self.said.append(self.story.failed(attempt, error, body=body))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def a_worker_dies_with_an_attempt(self, data: st.DataObject) -> None:
        attempt = self.working.pop(data.draw(st.integers(0, len(self.working) - 1)))
        self.story.record(self.story.lost(attempt))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def the_own_process_of_an_attempt_dies(self, data: st.DataObject) -> None:
        attempt = self.working.pop(data.draw(st.integers(0, len(self.working) - 1)))
        self.said.append(self.story.died(attempt))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def an_attempt_is_given_up_though_its_worker_lives(self, data: st.DataObject) -> None:
        self.story.record(self.story.lost(data.draw(st.sampled_from(self.working))))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def a_worker_sends_a_heartbeat(self, data: st.DataObject) -> None:
        self.story.beat(*data.draw(st.lists(st.sampled_from(self.working), unique_by=id)))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def the_broker_brings_messages(self, data: st.DataObject) -> None:
        self.story.record(*data.draw(st.lists(st.sampled_from(self.said), min_size=1, max_size=6)))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def the_collector_crashes_before_its_commit(self, data: st.DataObject) -> None:
        with self.engine.connect() as connection:
            record_outcomes(connection, [data.draw(st.sampled_from(self.said))])
            connection.rollback()

    @invariant()
    def the_invariants_hold(self) -> None:
        self.rows = self.story.everything()
        self.the_counters_of_a_group_equal_its_rows()
        self.an_accepted_outcome_never_changes()
        self.a_stored_trajectory_never_changes()
        self.only_successes_have_rewards()
        self.attempts_stay_within_their_budgets()
        self.budgets_are_spent_exactly_once()
        self.attempts_move_by_their_table_and_one_wins()
        self.every_move_is_in_the_tables()

    def the_counters_of_a_group_equal_its_rows(self) -> None:
        rollouts = self.rows["rollouts"]
        for group in self.rows["groups"]:
            states = [r["state"] for r in rollouts if r["group_id"] == group["group_id"]]
            for state in TERMINAL:
                assert group[f"n_{state}"] == states.count(state)
            complete = all(state in TERMINAL for state in states)
            assert (group["state"] != "open") == complete
            if group["state"] == "ready":
                assert group["n_succeeded"] >= group["n_min"]
            if group["state"] == "dropped":
                assert group["n_succeeded"] < group["n_min"]
                assert group["drop_reason"] == "failed"

    def an_accepted_outcome_never_changes(self) -> None:
        for row in self.rows["rollouts"]:
            if row["state"] not in TERMINAL:
                assert row["rollout_id"] not in self.accepted
                continue
            outcome = (row["state"], row["reward"], row["winner_attempt_no"], row["finished_at"])
            assert self.accepted.setdefault(row["rollout_id"], outcome) == outcome

    def a_stored_trajectory_never_changes(self) -> None:
        unscored = {row["rollout_id"]: row["unscored_no"] for row in self.rows["rollouts"]}
        stored: set[bytes] = set()
        for row in self.rows["trajectories"]:
            body, rollout_id = bytes(row["body"]), row["rollout_id"]
            numbers = {row["attempt_no"], unscored[rollout_id]}
            assert body.decode() in {f"{rollout_id} {number}" for number in numbers}
            if rollout_id in self.accepted and row["attempt_no"] == self.accepted[rollout_id][2]:
                stored.add(body)
        assert len(stored) == sum(row["state"] == "succeeded" for row in self.rows["rollouts"])

    def only_successes_have_rewards(self) -> None:
        for row in self.rows["rollouts"]:
            assert (row["reward"] is not None) == (row["state"] == "succeeded")

    def attempts_stay_within_their_budgets(self) -> None:
        config = self.story.config
        for row in self.rows["rollouts"]:
            # A late success of a lost attempt counts too, so it may be one more.
            late = row["state"] == "succeeded"
            assert row["attempts_used"] <= config.max_attempts + late
            assert row["died_count"] <= config.max_lost

    def budgets_are_spent_exactly_once(self) -> None:
        events = self.rows["events"]
        for row in self.rows["rollouts"]:
            reasons = [
                event["reason"] or event["to_state"]
                for event in events
                if event["entity_id"] == row["rollout_id"]
            ]
            assert row["attempts_used"] == sum(reason in COUNTED for reason in reasons)
            losses = sum(reason in LOST for reason in reasons)
            # The first death of an own process may count twice, so that isolation goes on.
            assert losses <= row["lost_count"] <= losses + bool(row["died_count"])

    def attempts_move_by_their_table_and_one_wins(self) -> None:
        winners = {
            (row["rollout_id"], row["winner_attempt_no"])
            for row in self.rows["rollouts"]
            if row["state"] == "succeeded"
        }
        succeeded = set()
        for row in self.rows["attempts"]:
            key, state = (row["rollout_id"], row["attempt_no"]), AttemptState(row["state"])
            before = self.attempts.get(key, state)
            assert state is before or state in ATTEMPT_TRANSITIONS[before], f"{before} → {state}"
            self.attempts[key] = state
            if state is AttemptState.SUCCEEDED:
                succeeded.add(key)
        sessions = {(r["rollout_id"], r["unscored_no"]) for r in self.rows["rollouts"]}
        assert succeeded - sessions == winners - sessions
        assert not self.is_remote or not winners & sessions

    def every_move_is_in_the_tables(self) -> None:
        known: dict[Any, str] = {}
        for event in self.rows["events"]:
            before, after = event["from_state"], event["to_state"]
            start = "open" if event["entity"] == "group" else "queued"
            assert known.get(event["entity_id"], start) == before
            if event["entity"] == "group":
                assert GroupState(after) in GROUP_TRANSITIONS[GroupState(before)]
            else:
                assert RolloutState(after) in ROLLOUT_TRANSITIONS[RolloutState(before)]
            known[event["entity_id"]] = after
        rows = {row["rollout_id"]: row["state"] for row in self.rows["rollouts"]}
        rows |= {row["group_id"]: row["state"] for row in self.rows["groups"]}
        assert {key: rows[key] for key in known} == known

    def teardown(self) -> None:
        if not hasattr(self, "story"):
            return
        self.story.record(*self.said)
        for _ in range(WORST_ATTEMPTS):
            for attempt in self.working:
                self.story.record(self.story.lost(attempt))
            self.working = self.story.claim()
            if not self.working:
                break
            self.story.record(*map(self.story.succeeded, self.working))
            self.working = []
        assert set(self.story.states()) <= TERMINAL
        assert all(group["state"] in ("ready", "dropped") for group in self.story.groups())
        # What was said before is still on its way: it changes nothing any more.
        before = self.story.rollouts(), self.story.groups()
        self.story.record(*reversed(self.said))
        assert (self.story.rollouts(), self.story.groups()) == before
        with self.engine.connect() as connection:
            assert check_accounting(connection, self.story.run.run_id) == []


@pytest.mark.timeout(400)  # shrinking a failure takes minutes
def test_no_history_breaks_an_invariant(engine):
    class OwnHistory(History):
        pass

    OwnHistory.engine = engine
    run_state_machine_as_test(
        OwnHistory,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            # Not `explain`: it traces every line, and a failure is clear enough without.
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
