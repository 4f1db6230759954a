"""The transition tables: complete, closed, and the only way from state to state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import IllegalTransition
from pipeline.contract.rollout import (
    ATTEMPT_TRANSITIONS,
    GROUP_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    AttemptState,
    GroupState,
    RolloutState,
    require_transition,
)

TABLES: list[tuple[type[StrEnum], Mapping[Any, frozenset[Any]], StrEnum]] = [
    (RolloutState, ROLLOUT_TRANSITIONS, RolloutState.QUEUED),
    (GroupState, GROUP_TRANSITIONS, GroupState.OPEN),
    (AttemptState, ATTEMPT_TRANSITIONS, AttemptState.DISPATCHED),
]
each_table = pytest.mark.parametrize(
    ("states", "table", "start"), TABLES, ids=["rollout", "group", "attempt"]
)


@each_table
def test_the_table_has_a_row_for_every_state_and_names_no_other(states, table, start):
    assert set(table) == set(states)
    assert frozenset().union(*table.values()) <= set(states)


@each_table
def test_every_state_can_be_reached_from_the_first(states, table, start):
    reached, frontier = {start}, {start}
    while frontier:
        frontier = frozenset().union(*(table[state] for state in frontier)) - reached
        reached |= frontier
    assert reached == set(states)


@each_table
def test_a_move_is_allowed_exactly_where_the_table_has_it(states, table, start):
    for before in states:
        for after in states:
            if after in table[before]:
                require_transition(before, after)
            else:
                with pytest.raises(IllegalTransition, match=f"from {before} to {after}"):
                    require_transition(before, after)


@each_table
@given(data=st.data())
def test_a_random_history_never_leaves_the_table(states, table, start, data):
    state = start
    for wish in data.draw(st.lists(st.sampled_from(list(states)), max_size=20)):
        allowed = wish in table[state]
        try:
            require_transition(state, wish)
        except IllegalTransition:
            assert not allowed
            continue
        assert allowed
        state = wish


def test_an_accepted_outcome_is_for_ever():
    assert not ROLLOUT_TRANSITIONS[RolloutState.SUCCEEDED]


def test_only_a_trainer_that_goes_back_leads_out_of_consumed():
    # To an earlier checkpoint: its groups are ready again, or dropped and enqueued afresh.
    assert GROUP_TRANSITIONS[GroupState.CONSUMED] == {GroupState.READY, GroupState.DROPPED}


def test_only_an_operator_leads_out_of_failed_and_cancelled():
    # Retry, and for what only its scorer failed: rescore.
    assert ROLLOUT_TRANSITIONS[RolloutState.FAILED] == {RolloutState.QUEUED, RolloutState.SUCCEEDED}
    assert ROLLOUT_TRANSITIONS[RolloutState.CANCELLED] == {RolloutState.QUEUED}


def test_a_group_is_never_opened_again_while_a_trainer_holds_it():
    assert GroupState.OPEN not in GROUP_TRANSITIONS[GroupState.LEASED]


def test_a_lost_attempt_may_still_win():
    assert AttemptState.SUCCEEDED in ATTEMPT_TRANSITIONS[AttemptState.LOST]
