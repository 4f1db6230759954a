"""What a run says it waits for."""

from __future__ import annotations

from dataclasses import replace

from pipeline.contract.rollout import RunState
from pipeline.store.capacity import Capacity
from pipeline.store.remote_sessions import SessionWaits
from pipeline.store.wait_reasons import (
    TrainerFacts,
    WaitFacts,
    explain_trainer_wait,
    explain_wait,
)

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


def test_a_paused_policy_is_told_with_what_ends_the_pause():
    (told, _) = explain_wait(replace(BUSY, paused_version=5))
    assert told == (
        "Its policy is paused at version 5: model calls wait until the trainer publishes the next "
        "one (rollout policy publish sums VERSION)."
    )


def test_rollouts_that_would_be_too_old_say_what_is_ahead_of_them():
    capacity = Capacity(ready=8, leased=16, running=40, max_staleness=3, groups_per_step=16)
    (told,) = explain_wait(replace(BUSY, running=0, queued=9, capacity=capacity))
    assert told == (
        "9 rollouts are queued and would be too old when they are trained: 64 groups are ahead of "
        "them (8 ready, 16 leased, 40 under way), and the run begins 64 at most (max_staleness 3, "
        "16 groups per step); they wait for the trainer to pull, publish or commit."
    )
    room = replace(capacity, ready=7)
    assert explain_wait(replace(BUSY, running=0, queued=9, capacity=room)) == (
        "9 rollouts are queued.",
    )


def test_a_run_on_agentcore_names_used_up_sessions_and_refused_calls():
    sessions = SessionWaits(own=600, others=400, ended=0, most=1000, throttled=0, refused=0)
    waiting = replace(BUSY, running=0, queued=5, sessions=sessions)
    assert explain_wait(waiting) == (
        "5 rollouts are queued; all 1000 sessions (agentcore.max_sessions) are in use, 600 by this "
        "run and 400 by other runs.",
    )
    (stopping,) = explain_wait(replace(waiting, sessions=sessions._replace(ended=7)))
    assert stopping.endswith("by other runs; 7 of them have ended and wait for their stop.")
    for most in (1001, None):
        free = replace(waiting, sessions=sessions._replace(most=most))
        assert explain_wait(free) == ("5 rollouts are queued.",)
    refused = sessions._replace(throttled=3, refused=1)
    told = explain_wait(replace(waiting, retry_waits=5, next_retry_s=2.0, sessions=refused))
    assert told == (
        "5 rollouts wait for a retry, the next in 2 s; for 3 of them AgentCore throttled the call, "
        "for 1 of them the account had no free session, which uses no attempt.",
    )


def test_a_run_on_agentcore_names_rollouts_that_wait_for_their_reward():
    sessions = SessionWaits(own=2, others=0, ended=0, most=9, throttled=0, refused=0)
    one = sessions._replace(unscored=1, reward="gsm8k")
    assert explain_wait(replace(BUSY, running=0, dispatched=1, sessions=one))[0] == (
        "1 rollout waits for its reward: the session has ended, and a worker scores what was left "
        "with gsm8k."
    )
    two = one._replace(unscored=2)
    assert explain_wait(replace(BUSY, running=0, dispatched=2, sessions=two))[0].startswith(
        "2 rollouts wait for their reward: the sessions have ended"
    )


WAITING = TrainerFacts(
    wanted=16,
    groups={"open": 12, "ready": 3, "leased": 0, "consumed": 32, "dropped": 0},
    drops={},
    equal_rewards={},
    leased_elsewhere=0,
)


def test_a_trainers_wait_is_one_sentence_with_its_numbers():
    told = explain_trainer_wait(WAITING, replace(BUSY, queued=20))
    assert told == (
        "The trainer waits for 16 groups and 3 are ready: 12 are open with 4 rollouts under way, "
        "the oldest for 12 s, 20 rollouts are queued, 32 are consumed."
    )


def test_drops_are_part_of_it_those_of_equal_rewards_by_value():
    drops = {"stale": 2, "zero_variance": 5}
    facts = replace(WAITING, drops=drops, equal_rewards={"0": 4, "1": 1}, leased_elsewhere=8)
    told = explain_trainer_wait(facts, BUSY)
    assert told.endswith(
        "8 groups are leased to other consumers, 32 are consumed and 7 dropped (2 stale, "
        "5 zero_variance [all 0: 4, all 1: 1])."
    )


def test_a_trainer_that_waits_in_vain_is_told_so():
    over = replace(WAITING, groups={**WAITING.groups, "open": 0, "ready": 0}, drops={"failed": 1})
    finished = replace(BUSY, state=RunState.FINISHED, running=0)
    assert explain_trainer_wait(over, finished) == (
        "No group can become ready any more: 32 are consumed and 1 dropped (1 failed)."
    )


def test_enough_ready_groups_are_told_too():
    told = explain_trainer_wait(replace(WAITING, wanted=3), BUSY)
    assert told.startswith("3 groups are ready and the trainer asks for 3: it can pull")
