"""The error trees and the table."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.contract import errors
from pipeline.contract.errors import (
    ERROR_TABLE,
    Action,
    AgentError,
    ErrorClass,
    ModelTransportError,
    PipelineError,
    RewardError,
    RolloutError,
    boundary,
)


def subclasses(base: type) -> list[type]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    ]


def test_the_table_has_a_row_for_every_class():
    assert set(ERROR_TABLE) == set(ErrorClass)


def test_an_error_of_a_rollout_is_never_one_of_ours():
    assert not set(subclasses(PipelineError)) & set(subclasses(RolloutError))


@pytest.mark.parametrize("kind", subclasses(PipelineError))
def test_every_error_of_ours_has_a_code_and_an_exit_code(kind):
    error = kind("What.", why="Why.", remedy="Remedy.")
    assert error.code.startswith("E")
    assert 1 <= error.exit_code <= 7
    assert str(error) == "What. Why. Remedy."


def test_no_two_errors_of_ours_share_a_code():
    codes = [kind.code for kind in subclasses(PipelineError)]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", subclasses(RolloutError))
def test_every_error_of_a_rollout_has_a_row_in_the_table(kind):
    assert kind("it broke").error_class in ERROR_TABLE


def test_the_tree_at_the_top_of_the_module_names_every_class():
    assert errors.__doc__ is not None
    for kind in [*subclasses(PipelineError), *subclasses(RolloutError)]:
        assert kind.__name__ in errors.__doc__


def test_foreign_exceptions_are_attributed_to_the_boundary_they_crossed():
    with pytest.raises(RewardError, match=r"KeyError: 'gold'") as caught, boundary(RewardError):
        raise KeyError("gold")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_typed_error_passes_a_boundary_unchanged():
    error = ModelTransportError("reset")
    with pytest.raises(ModelTransportError) as caught, boundary(AgentError):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_cancellation_and_exits_pass_every_boundary(kind):
    with pytest.raises(kind), boundary(AgentError):
        raise kind


def test_only_waits_and_hand_backs_are_free():
    free = {name for name, action in ERROR_TABLE.items() if action is Action.RETRY_FREE}
    assert free == {ErrorClass.MODEL_RATE_LIMIT, ErrorClass.WORKER_STOPPED}
