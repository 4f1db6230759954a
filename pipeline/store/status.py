"""The status of a run: counts by state, reward, errors, tokens, and reasons for waiting.

Used by the command line and the trainer client. One statement (`status_rows.py`) reads the counts,
so they are consistent. Reads only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from pipeline.contract.activity import RunActivity
from pipeline.contract.rollout import DropReason, GroupState, RolloutState, RunState
from pipeline.contract.run import RunConfig
from pipeline.contract.train_batch import BatchSpec, PipelineStats
from pipeline.store.accounting import Accounting, account
from pipeline.store.activity import describe_failing_tools, describe_missing_calls, run_activity
from pipeline.store.capacity import run_capacity
from pipeline.store.remote_sessions import session_waits
from pipeline.store.reward_error import GROUP_SUMS, prompt_sums
from pipeline.store.run_health import is_failing
from pipeline.store.runs import Run
from pipeline.store.status_rows import read_figures, read_state
from pipeline.store.train_batch_rows import count_leased_elsewhere
from pipeline.store.unfit_groups import count_equal_rewards, count_ready_tokens, count_too_small
from pipeline.store.wait_reasons import (
    TrainerFacts,
    WaitFacts,
    explain_trainer_wait,
    explain_wait,
)
from pipeline.store.working_time import elapsed_s


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of one reward, or of a part of it, over the trajectories of a run it scored."""

    name: str
    version: str
    n: int
    mean: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's figures at one moment; counts have an entry for every state."""

    run: str
    state: RunState
    state_reason: str | None
    is_failing: bool  #: it is paused because of its failures
    allowed_error_rate: float
    groups: dict[str, int]
    drops: dict[str, int]
    rollouts: dict[str, int]
    reward_n: int
    reward_mean: float | None
    reward_std: float | None
    reward_stderr: float | None  #: of the mean, clustered by prompt; None below two prompts
    reward_prompts: int  #: prompts that have a reward
    scores: tuple[Score, ...]  #: of every reward, the run's own and rescored ones
    attempts: int
    retries: int  #: attempts that failed and were followed by another, or will be
    errors: dict[str, int]
    activity: RunActivity
    prompt_tokens: int
    completion_tokens: int
    saved_tokens: int  #: of replayed calls; they are also in the two counts before
    with_tokens: int  #: succeeded rollouts whose trajectory has token ids
    elapsed_s: float
    oldest_running_s: float | None
    live_workers: int
    waits: tuple[str, ...]
    warnings: tuple[str, ...]  #: problems that the run does not wait for
    sums: Accounting
    trainer: str | None  #: why its trainer waits; None: the run has had no trainer
    equal_rewards: dict[str, int]  #: groups dropped as `zero_variance`, by the reward

    @property
    def is_done(self) -> bool:
        """Whether every rollout is terminal and no more are announced."""
        return self.state is RunState.FINISHED or (
            self.state is RunState.CANCELLED and not self.n_open
        )

    @property
    def has_failed(self) -> bool:
        """Whether the run came to its end, or to a pause, with too many failed rollouts.

        A pause counts once no rollout is under way any more.
        """
        ended = self.rollouts["succeeded"] + self.rollouts["failed"]
        if self.is_done:
            return self.rollouts["failed"] > self.allowed_error_rate * ended
        return self.is_failing and not (self.rollouts["dispatched"] + self.rollouts["running"])

    @property
    def n_open(self) -> int:
        """Rollouts that are not terminal."""
        return sum(self.rollouts[state] for state in ("queued", "dispatched", "running"))

    def to_json(self) -> dict[str, Any]:
        """Return the document of `rollout status --json`."""
        return {
            "run": self.run,
            "state": str(self.state),
            "state_reason": self.state_reason,
            "groups": self.groups,
            "rollouts": self.rollouts,
            "reward": {
                "n": self.reward_n,
                "mean": self.reward_mean,
                "std": self.reward_std,
                "stderr": self.reward_stderr,
                "prompts": self.reward_prompts,
            },
            "attempts": self.attempts,
            "retries": self.retries,
            "errors": self.errors,
            "model_calls": [calls.model_dump(mode="json") for calls in self.activity.endpoints],
            "tools": {name: calls.model_dump() for name, calls in self.activity.tools.items()},
            "tokens": {
                "prompt": self.prompt_tokens,
                "completion": self.completion_tokens,
                "saved": self.saved_tokens,
                "rollouts_with_ids": self.with_tokens,
            },
            "elapsed_s": round(self.elapsed_s, 3),
            "accounting": self.sums.to_json(),
            "waits": list(self.waits),
            "scores": [asdict(score) for score in self.scores],
            "warnings": list(self.warnings),
            "trainer": self.trainer,
            "zero_variance": self.equal_rewards,
        }


def run_status(connection: Connection, run: Run, *, started: Collection[str] = ()) -> RunStatus:
    """Return a run's figures.

    `elapsed_s` is the run's working time: it stands still while the run is paused, and while no
    controller works on it.

    Args:
        connection: An open transaction.
        run: The run.
        started: Kinds of processes (`worker`, `controller`) that the asking command started.
    """
    return _read_status(connection, run, prompt_sums(connection, run), started)[0]


def _read_status(
    connection: Connection,
    run: Run,
    sums: str,
    started: Collection[str] = (),
    *,
    consumer: str | None = None,
    spec: BatchSpec | None = None,
    asks: bool = False,
) -> tuple[RunStatus, TrainerFacts | None]:
    """Return a run's figures, and those of its trainer if it has one or one asks."""
    row = read_figures(connection, run.run_id, sums)
    rollouts = {name: int(getattr(row, name)) for name in ("total", *map(str, RolloutState))}
    n_open = rollouts["queued"] + rollouts["dispatched"] + rollouts["running"]
    state = _state(row.state, is_done=row.is_sealed and not n_open)
    errors = dict(sorted(row.errors.items(), key=lambda item: (-item[1], item[0])))
    oldest = _figure(row.oldest_running_s)
    activity = run_activity(connection, run.run_id)
    groups = _by_state(row.groups)
    drops = {reason: n for _, reason, n in row.groups if reason is not None}
    equal = count_equal_rewards(connection, run) if DropReason.ZERO_VARIANCE in drops else {}
    has_trainer = run.config.is_admitted or groups["leased"] or groups["consumed"]
    capacity = run_capacity(connection, run) if has_trainer or asks else None
    facts = WaitFacts(
        run=run.slug,
        state=state,
        state_reason=row.state_reason,
        is_sealed=row.is_sealed,
        queued=rollouts["queued"],
        dispatched=rollouts["dispatched"],
        running=rollouts["running"],
        oldest_running_s=oldest,
        retry_waits=row.retry_waits,
        next_retry_s=_figure(row.next_retry_s),
        live_workers=row.live_workers,
        live_collectors=row.live_collectors,
        errors=errors,
        endpoints=activity.endpoints,
        queue=run.config.queue,
        started=started,
        paused_version=row.paused_version,
        capacity=capacity if run.config.is_admitted else None,
        sessions=session_waits(connection, run),
    )
    trainer = capacity and TrainerFacts(
        wanted=(spec and spec.groups) or capacity.groups_per_step,
        wanted_tokens=spec and spec.tokens,
        ready_tokens=count_ready_tokens(connection, run, spec) if spec and spec.tokens else 0,
        too_small=spec and count_too_small(connection, run, spec),
        groups=groups,
        drops=drops,
        equal_rewards=equal,
        leased_elsewhere=count_leased_elsewhere(connection, run, consumer),
    )
    status = RunStatus(
        run=run.slug,
        sums=account(connection, run.run_id),
        state=state,
        state_reason=row.state_reason,
        is_failing=state is RunState.PAUSED and _is_failing(row, rollouts["failed"], run.config),
        allowed_error_rate=run.config.allowed_error_rate,
        groups=groups,
        drops=drops,
        rollouts=rollouts,
        reward_n=int(row.reward_n),
        reward_mean=_figure(row.reward_mean),
        reward_std=_figure(row.reward_std),
        reward_stderr=_figure(row.reward_stderr),
        reward_prompts=int(row.reward_prompts),
        scores=tuple(Score(name, version, n, float(mean)) for name, version, n, mean in row.scores),
        attempts=int(row.attempts),
        retries=max(0, int(row.failed_attempts) - rollouts["failed"]),
        errors=errors,
        activity=activity,
        prompt_tokens=int(row.prompt_tokens),
        completion_tokens=int(row.completion_tokens),
        saved_tokens=int(row.saved_tokens),
        with_tokens=int(row.with_tokens),
        elapsed_s=_elapsed_s(row, state, n_open),
        oldest_running_s=oldest,
        live_workers=row.live_workers,
        waits=explain_wait(facts),
        trainer=trainer and explain_trainer_wait(trainer, facts),
        equal_rewards=equal,
        warnings=(
            *describe_failing_tools(activity, run.slug),
            *describe_missing_calls(
                activity,
                # A remote agent always calls its model itself.
                succeeded=rollouts["succeeded"] if run.config.agentcore is None else 0,
                tokens=int(row.prompt_tokens + row.completion_tokens),
            ),
        ),
    )
    return status, trainer


def run_stats(
    connection: Connection, run: Run, *, consumer: str | None = None, spec: BatchSpec | None = None
) -> PipelineStats:
    """Return a run's figures as the trainer client hands them out to a consumer.

    Args:
        connection: An open transaction.
        run: The run.
        consumer: The trainer that asks; None: an operator asks.
        spec: The batch that the trainer waits for; None: the groups of one step of the run.
    """
    # Without the standard error, which trainers do not get, the sums over groups are enough.
    status, trainer = _read_status(
        connection, run, GROUP_SUMS, consumer=consumer, spec=spec, asks=True
    )
    assert trainer is not None
    return PipelineStats(
        run=status.run,
        state=str(status.state),
        groups=status.groups,
        rollouts=status.rollouts,
        errors=status.errors,
        drops=status.drops,
        oldest_running_s=status.oldest_running_s,
        live_workers=status.live_workers,
        waits=status.waits,
        leased_elsewhere=trainer.leased_elsewhere,
        too_small=trainer.too_small or 0,
        why=status.trainer,
        equal_rewards=status.equal_rewards,
    )


def run_state(connection: Connection, run: Run) -> RunState:
    """Return a run's state now, `finished` included; cheap enough to ask often."""
    row = read_state(connection, run.run_id)
    return _state(row.state, is_done=row.is_done)


def _is_failing(row: Any, failed: int, config: RunConfig) -> bool:
    return (config.group_policy == "fail_run" and failed > 0) or is_failing(
        config,
        finished=row.judged_finished,
        failed=row.judged_failed,
        prompts=row.next_group_no,
    )


def _elapsed_s(row: Any, state: RunState, n_open: int) -> float:
    if not n_open:
        return elapsed_s(row.worked_s, _figure(row.ended_s))
    return elapsed_s(row.worked_s, float(row.since_s) if state is RunState.ACTIVE else None)


def _state(stored: str, *, is_done: bool) -> RunState:
    state = RunState(stored)
    return RunState.FINISHED if is_done and state is not RunState.CANCELLED else state


def _figure(value: Any) -> float | None:
    return None if value is None else float(value)


def _by_state(counted: Iterable[tuple[str, str | None, int]]) -> dict[str, int]:
    by_state = {str(state): 0 for state in GroupState}
    for state, _, n in counted:
        by_state[state] += n
    return by_state
