"""States, transitions and identities of runs, groups, rollouts and attempts.

Used by every process. The transition tables are data: the store guards each update with them, the
tests draw random histories against them. Must not: read a clock, a database or the environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

from pipeline.contract.errors import IllegalTransition

_NAMESPACE = UUID("6f0e4a52-6d0b-5b0e-9a53-5c7f1c1d7a10").bytes
#: Dataset rows whose ids share a prefix, so that rows in use together are close in every index.
BLOCK_ROWS = 256
#: Losses from which on a rollout runs in a process of its own (ADR 0033).
ISOLATED_FROM = 2


class RunPurpose(StrEnum):
    """The purpose of a run: `train` keeps usable groups, `eval` reports every outcome."""

    TRAIN = "train"
    EVAL = "eval"


class RunState(StrEnum):
    """State of a run as stored; `finished` is derived: sealed, and nothing left to do."""

    ACTIVE = "active"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    FINISHED = "finished"


class GroupState(StrEnum):
    """State of a group: one prompt with the n rollouts asked of it."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """The reason that a group will not reach the trainer."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    FAILED = "failed"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    UNREADABLE = "unreadable"  #: a trajectory is gone or damaged
    REWOUND = "rewound"  #: its step was given up by a rewind, and its prompt enqueued afresh
    OPERATOR = "operator"


class RolloutState(StrEnum):
    """State of a rollout: one try to solve a prompt."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    """State of an attempt: one execution of a rollout."""

    DISPATCHED = "dispatched"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    LOST = "lost"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


class StopReason(StrEnum):
    """The reason that a good trajectory ended; never an exception."""

    ANSWERED = "answered"
    MAX_STEPS = "max_steps"
    MAX_TOKENS = "max_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    AGENT_TIMEOUT = "agent_timeout"
    TOOL_STOPPED = "tool_stopped"


TERMINAL_ROLLOUT_STATES = frozenset(
    {RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED}
)

_R, _G, _A = RolloutState, GroupState, AttemptState

ROLLOUT_TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = MappingProxyType(
    {
        # queued → succeeded: the late success of an attempt that was given up as lost.
        # queued → queued: its late result, which waits for a reward now.
        _R.QUEUED: frozenset({_R.QUEUED, _R.DISPATCHED, _R.SUCCEEDED, _R.FAILED, _R.CANCELLED}),
        # dispatched → succeeded: the attempt ended before the first heartbeat listed it.
        _R.DISPATCHED: frozenset({_R.RUNNING, _R.QUEUED, _R.SUCCEEDED, _R.FAILED, _R.CANCELLED}),
        _R.RUNNING: frozenset({_R.QUEUED, _R.SUCCEEDED, _R.FAILED, _R.CANCELLED}),
        # failed → succeeded: only the scorer had failed, and scoring again worked (docs/adr/0014).
        _R.FAILED: frozenset({_R.QUEUED, _R.SUCCEEDED}),
        _R.SUCCEEDED: frozenset(),
        _R.CANCELLED: frozenset({_R.QUEUED}),
    }
)
GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = MappingProxyType(
    {
        _G.OPEN: frozenset({_G.READY, _G.DROPPED}),
        _G.READY: frozenset({_G.LEASED, _G.DROPPED, _G.OPEN}),
        _G.LEASED: frozenset({_G.CONSUMED, _G.READY, _G.DROPPED}),
        _G.DROPPED: frozenset({_G.OPEN}),
        # consumed → ready, dropped: the trainer went back to an earlier checkpoint.
        _G.CONSUMED: frozenset({_G.READY, _G.DROPPED}),
    }
)
ATTEMPT_TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = MappingProxyType(
    {
        _A.DISPATCHED: frozenset(set(_A) - {_A.DISPATCHED}),
        _A.RUNNING: frozenset(set(_A) - {_A.DISPATCHED, _A.RUNNING}),
        # A lost attempt may still answer: its late success wins or is kept for audit.
        _A.LOST: frozenset({_A.SUCCEEDED, _A.SUPERSEDED}),
        _A.CANCELLED: frozenset({_A.SUPERSEDED}),
        _A.SUCCEEDED: frozenset(),
        _A.FAILED: frozenset({_A.SUCCEEDED}),
        _A.TIMED_OUT: frozenset(),
        _A.SUPERSEDED: frozenset(),
    }
)


def require_transition(before: StrEnum, after: StrEnum) -> None:
    """Check a move against its table.

    Raises:
        IllegalTransition: The move is not in the table.
    """
    tables: dict[Any, Any] = {
        RolloutState: ROLLOUT_TRANSITIONS,
        GroupState: GROUP_TRANSITIONS,
        AttemptState: ATTEMPT_TRANSITIONS,
    }
    if after not in tables[type(before)][before]:
        noun = type(before).__name__.removesuffix("State").lower()
        raise IllegalTransition(f"A {noun} cannot go from {before} to {after}.")


def run_id_of(slug: str) -> UUID:
    """Return the id of the run with this slug."""
    return _uuid5(_NAMESPACE, slug.encode())


def prompt_id_of(run_id: UUID, dataset: str, split: str, epoch: int, row_no: int) -> UUID:
    """Return the id of one dataset row within a run; the same row always gets the same id."""
    block = hashlib.sha1(b"%b%d" % (run_id.bytes, row_no // BLOCK_ROWS), usedforsecurity=False)
    name = f"{dataset}\0{split}\0{epoch}\0{row_no}".encode()
    return _in_block(block.digest(), run_id.bytes, name)


def group_id_of(prompt_id: UUID) -> UUID:
    """Return the id of the prompt's group."""
    return _in_block(prompt_id.bytes, prompt_id.bytes, b"group")


def rollout_id_of(prompt_id: UUID, rollout_index: int) -> UUID:
    """Return the id of the rollout with this index (0..n-1) in the prompt's first group."""
    return _in_block(prompt_id.bytes, prompt_id.bytes, b"%d" % rollout_index)


def afresh_group_id_of(group_id: UUID) -> UUID:
    """Return the id of the group in which the prompt of a dropped group is tried afresh."""
    return _in_block(group_id.bytes, group_id.bytes, b"afresh")


def afresh_rollout_id_of(group_id: UUID, rollout_index: int) -> UUID:
    """Return the id of the rollout with this index in a group that was enqueued afresh."""
    return _in_block(group_id.bytes, group_id.bytes, b"%d" % rollout_index)


def batch_id_of(run_id: UUID, consumer: str, step: int) -> UUID:
    """Return the id of the train batch of one consumer's step."""
    return _uuid5(run_id.bytes, f"{consumer}\0{step}".encode())


#: Pattern of labels; a label becomes part of file names and object keys.
LABEL_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,127}$"


def label_of(run: str, group_no: int, rollout_index: int, attempt_no: int) -> str:
    """Return the readable name of an attempt, which is also its Celery task id."""
    return f"{rollout_label_of(run, group_no, rollout_index)}-a{attempt_no}"


def rollout_label_of(run: str, group_no: int, rollout_index: int) -> str:
    """Return the readable name of a rollout."""
    return f"{group_label_of(run, group_no)}-r{rollout_index}"


def group_label_of(run: str, group_no: int) -> str:
    """Return the readable name of a group."""
    return f"{run}-g{group_no:06d}"


def _uuid5(namespace: bytes, name: bytes) -> UUID:
    return _uuid(hashlib.sha1(namespace + name, usedforsecurity=False).digest(), version=5)


def _in_block(block: bytes, namespace: bytes, name: bytes) -> UUID:
    digest = hashlib.sha1(namespace + name, usedforsecurity=False).digest()
    return _uuid(block[:2] + digest[2:], version=8)


def _uuid(digest: bytes, *, version: int) -> UUID:
    # uuid.uuid5 costs three times this, and a dataset of 100k prompts needs a million of them.
    number = int.from_bytes(digest[:16])
    return UUID(int=number & ~(0xF000 << 64) & ~(0xC000 << 48) | (version << 76) | (0x8000 << 48))
