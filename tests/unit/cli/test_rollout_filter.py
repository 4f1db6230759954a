"""Conditions of `--where`: what they mean in SQL, and what they refuse."""

from __future__ import annotations

import pytest

from pipeline.contract.errors import InputError
from pipeline.store.rollout_filter import RolloutFilter, of_class, parse_filter


def test_values_are_bound_and_never_part_of_the_statement():
    found = parse_filter("""message == "x'; DROP TABLE runs; --" """)
    assert "DROP" not in found.sql
    assert found.parameters == {"where_0": "x'; DROP TABLE runs; --"}


def test_conditions_can_be_joined():
    both = of_class("agent_bug").and_also(parse_filter("attempts > 2"))
    assert both.sql == (
        "(r.error_class = :error_class) AND ((r.attempt_no > CAST(:where_0 AS double precision)))"
    )
    assert both.parameters == {"error_class": "agent_bug", "where_0": 2.0}
    assert RolloutFilter().sql == "true"


@pytest.mark.parametrize(
    "condition",
    [
        "error_class == 'agent_bug' and 'timeout' in message",
        "not (attempts >= 2 or lost != 0)",
        "error_class in ['sandbox', 'agent_bug']",
        "worker not in ('w1',)",
        "1 < attempts <= 3",
        "error_code is None",
        "group == -1",
        "reward == 0 and status == 'succeeded'",
        "stop_reason == 'max_steps' or tokens > 1000",
        "label == 'sums-g000000-r1'",
    ],
)
def test_comparisons_of_fields_are_understood(condition):
    assert parse_filter(condition).sql


@pytest.mark.parametrize(
    "condition",
    [
        "",
        "error_class ==",
        "__import__('os').system('true')",
        "message.upper() == 'X'",
        "[x for x in message]",
        "(lambda: 1)() == 1",
        "attempts + 1 == 2",
        "True",
        "attempts == True",
        "message == b'x'",
        "attempts == 10 ** 9",
        f"attempts == {10**400}",
        "message == 'a\\x00b'",
        "'a' < 1",
        "1 in attempts",
        "attempts == '1'",
        "nothing == 1",
        "(" * 500 + "attempts" + ")" * 500,
        "\0",
    ],
)
def test_everything_else_is_refused(condition):
    with pytest.raises(InputError) as refused:
        parse_filter(condition)
    assert refused.value.code == "E108"


def test_a_field_that_is_nearly_right_is_suggested():
    with pytest.raises(InputError, match="Did you mean 'error_class'"):
        parse_filter("error_clas == 'x'")
