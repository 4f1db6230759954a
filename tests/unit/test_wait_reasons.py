"""What a run says it waits for."""

from __future__ import annotations

from dataclasses import replace

from pipeline.contract.rollout import RunState
from pipeline.store.wait_reasons import WaitFacts, explain_wait

BUSY = WaitFacts(
    run="sums",
    state=RunState.ACTIVE,
    state_reason=None,
    is_sealed=True,
    queued=0,
    dispatched=0,
    running=4,
    oldest_running_s=12.3,
    retry_waits=0,
    next_retry_s=None,
    live_workers=1,
    live_collectors=1,
    errors={},
)


def test_a_finished_run_waits_for_nothing():
    assert explain_wait(replace(BUSY, state=RunState.FINISHED, running=0)) == ()


def test_running_rollouts_are_told_with_the_age_of_the_oldest():
    assert explain_wait(BUSY) == ("4 rollouts are running, the oldest for 12 s.",)


def test_a_queue_of_its_own_is_named_with_the_worker_that_takes_from_it():
    waiting = replace(BUSY, running=0, dispatched=2)
    assert explain_wait(waiting) == ("2 rollouts are on the way to a worker.",)
    (told,) = explain_wait(replace(waiting, queue="gpu"))
    assert told.endswith("rollout worker --queues gpu.")


def test_missing_processes_are_told_with_the_remedy():
    told = explain_wait(replace(BUSY, live_workers=0, live_collectors=0))
    assert told[0].startswith("No controller reports; start one with: rollout controller")
    assert told[1].startswith("No worker reports; start one with: rollout worker")


def test_what_the_asking_command_started_itself_is_not_asked_for():
    facts = replace(BUSY, live_workers=0, live_collectors=0, started={"controller"})
    told = explain_wait(facts)
    assert told[0] == (
        "The controller that this command started has not reported within the last 30 s."
    )
    assert told[1].startswith("No worker reports")


def test_a_pause_is_told_with_its_reason():
    told = explain_wait(replace(BUSY, state=RunState.PAUSED, state_reason="7 of 20 failed"))
    assert told[0] == "It is paused because 7 of 20 failed; go on with: rollout continue sums."


def test_rollouts_that_wait_for_a_retry_are_told_apart_from_queued_ones():
    told = explain_wait(replace(BUSY, running=0, queued=5, retry_waits=1, next_retry_s=2.6))
    assert told == ("1 rollout waits for a retry, the next in 3 s.", "4 rollouts are queued.")


def test_the_three_commonest_errors_are_named():
    errors = {"sandbox": 1, "agent_bug": 5, "contract": 2, "poison": 3}
    told = explain_wait(replace(BUSY, errors=errors))
    assert told[-1] == "Failed so far: 5 agent_bug, 3 poison, 2 contract."


def test_an_enqueueing_that_has_not_ended_is_told():
    assert explain_wait(replace(BUSY, running=0, is_sealed=False)) == (
        "Its prompts are still being enqueued, or that was interrupted.",
    )
