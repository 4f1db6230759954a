"""Which attempts' calls the next attempt replays."""

from __future__ import annotations

import uuid

import pytest

from pipeline.attachments import decide_replay
from pipeline.contract.errors import ErrorClass, ProcessDied
from pipeline.contract.journal import RESUMED_AFTER
from pipeline.retry import HELD_NO_MORE
from pipeline.store.journals import EarlierAttempt

LOST = (ErrorClass.WORKER_LOST, HELD_NO_MORE)
DIED = (ErrorClass.WORKER_LOST, ProcessDied.code)
DOWN = (ErrorClass.MODEL_TRANSPORT, "http_503")
BUSY = (ErrorClass.MODEL_RATE_LIMIT, "http_429")
BOX = (ErrorClass.SANDBOX, "sandbox")
STOPPED = (ErrorClass.WORKER_STOPPED, "worker_stopped")

Error = tuple[ErrorClass | None, str]


def after(*errors: Error, recorded: tuple[int, ...] | None = None) -> list[int]:
    """Decide after attempts with these ends; each but the first replayed calls."""
    return decide_replay(
        [
            EarlierAttempt(
                uuid.UUID(int=1),
                number,
                error_class,
                code,
                calls_replayed=number - 1,
                journal_bytes=100 if recorded is None or number in recorded else 0,
            )
            for number, (error_class, code) in enumerate(errors, start=1)
        ]
    )


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_an_error_of_the_agents_own_starts_afresh(error_class: ErrorClass) -> None:
    resumed = {"worker_lost", "worker_stopped", "sandbox", "model_rate_limit", "model_transport"}
    assert (error_class in RESUMED_AFTER) == (error_class in resumed)
    assert after((error_class, "x")) == ([1] if error_class in resumed else [])


def test_an_attempt_that_was_cancelled_is_not_gone_on_with() -> None:
    assert after((None, "")) == []


def test_every_attempt_since_the_last_start_afresh_counts() -> None:
    assert after(LOST, STOPPED, DOWN) == [1, 2, 3]
    assert after(LOST, (ErrorClass.AGENT_BUG, "agent_raised"), LOST) == [3]
    assert after(LOST, LOST, LOST, recorded=(1, 3)) == [1, 3]


@pytest.mark.parametrize("error", [DIED, DOWN, BOX])
def test_a_journal_that_led_to_one_error_twice_is_dropped(error: Error) -> None:
    assert after(error) == [1]
    assert after(error, error) == []
    assert after(error, LOST, error) == []
    assert after(error, error, LOST) == [3]


@pytest.mark.parametrize("error", [LOST, STOPPED, BUSY])
def test_ends_from_outside_never_count_against_a_journal(error: Error) -> None:
    assert after(*[error] * 9) == list(range(1, 10))


def test_two_different_errors_drop_nothing() -> None:
    assert after(BOX, DOWN, (ErrorClass.MODEL_TRANSPORT, "timeout")) == [1, 2, 3]


def test_an_error_that_came_without_a_replay_is_not_the_journals() -> None:
    first, second = (
        EarlierAttempt(uuid.UUID(int=1), n, *DOWN, calls_replayed=0, journal_bytes=9)
        for n in (1, 2)
    )
    assert decide_replay([first, second]) == [1, 2]
