"""Train batches for TRL's `GRPOTrainer`: a `rollout_func`, and the commits of its checkpoints.

Used in the trainer's processes. Needs the extra `trl`. Must not: commit a step before a checkpoint
that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec, ResumeInfo
from pipeline.tokens.rows import TokenRow
from pipeline.trainer.adapters import E_UNFIT
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.extras import require_extra
from pipeline.trainer.train_batch import TrainBatch

require_extra("trl", "trl", use="This adapter needs")

from transformers import TrainerCallback  # type: ignore[import-not-found]  # noqa: E402
from transformers.trainer_callback import (  # type: ignore[import-not-found]  # noqa: E402
    ExportableState,
)


def passthrough_reward(completions: Sequence[Any], rollout_reward: Any, **_: Any) -> list[Any]:
    """Return the rewards that the pipeline gave; for `GRPOTrainer(reward_funcs=…)`."""
    return list(rollout_reward)


class PipelineRollouts:
    """A `rollout_func` that pulls a batch instead of generating: a row for each prompt it is given.

    The texts of the trainer's prompts are not used: the run holds the prompts. Each call is one
    trainer step of the pipeline.

    Args:
        client: Pulls the steps.
        spec: Its `groups` follow from the trainer's batch size. Its `segments` must give one row
            for each rollout: `error` (default), `last` or `longest`.
        policy_version: Returns the version of the weights being trained; None: no check.
        timeout_s: Longest wait for a batch.

    Raises:
        InputError: The spec allows several rows for a rollout.
    """

    def __init__(
        self,
        client: TrainerClient,
        spec: BatchSpec | None = None,
        *,
        policy_version: Callable[[], int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._spec = spec or BatchSpec(segments="error", needs_logprobs=True)
        if self._spec.segments == "all":
            raise InputError(
                "GRPOTrainer takes one row for each rollout, and segments='all' may give several.",
                remedy="Use BatchSpec(segments='error'), 'last' or 'longest'.",
                code=E_UNFIT,
            )
        self._client = client
        self._policy_version = policy_version
        self._timeout_s = timeout_s
        self._next_step = 0

    @property
    def trained_step(self) -> int | None:
        """The last step that was given to the trainer."""
        return self._next_step - 1 if self._next_step else None

    def resume(self, committed_step: int | None) -> ResumeInfo:
        """Continue after the step of a checkpoint, which is committed if it is not yet."""
        info = self._client.resume(committed_step=committed_step)
        self._next_step = info.next_step
        return info

    def commit(self, step: int, checkpoint_uri: str | None) -> None:
        """Consume the steps up to this one."""
        self._client.commit(step, checkpoint_uri=checkpoint_uri)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return this process's rows of the next step.

        Args:
            prompts: Of this process, each repeated `num_generations` times.
            trainer: The `GRPOTrainer`.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (1 on sampled tokens),
            `rollout_reward` and `rollout_id`, a list each, one entry for each prompt.

        Raises:
            NotReady: No batch was ready in time, or the run has no more.
            NotAllowed: The trainer evaluates, or the groups do not fit the trainer's batch.
        """
        if not trainer.model.training:
            raise NotAllowed(
                "The trainer asked for rollouts of an evaluation.",
                why="A run has rollouts to train on.",
                remedy="Evaluate with a run of its own: rollout run … --set reward=….",
                code=E_UNFIT,
            )
        n, own = trainer.num_generations, len(prompts)
        total = own * trainer.accelerator.num_processes
        rows = self._pull(groups=total // n, n=n)
        first = own * trainer.accelerator.process_index
        self._next_step += 1
        return _columns(rows[first : first + own])

    def _pull(self, *, groups: int, n: int) -> list[TokenRow]:
        spec = replace(self._spec, groups=groups, require_full_groups=True)
        version = None if self._policy_version is None else self._policy_version()
        batch = self._client.pull(
            self._next_step, spec, policy_version=version, timeout_s=self._timeout_s
        )
        if why := _misfit(batch, groups, n):
            # The groups are free again: for a trainer with another batch size.
            self._client.abandon(self._next_step, reason=why)
            raise NotAllowed(
                f"Step {batch.step} of run {batch.run} does not fit the trainer's batch.",
                why=why,
                remedy="Set num_generations to the run's n, and max_steps to its number of full "
                f"batches of {groups} groups.",
                code=E_UNFIT,
            )
        return batch.rows()


class TrainedSteps(Protocol):
    """Gives steps to a trainer, and knows which of them were trained."""

    @property
    def trained_step(self) -> int | None:
        """The last step of which all rows were trained."""
        ...

    def resume(self, committed_step: int | None) -> ResumeInfo:
        """Continue after the step of a checkpoint."""
        ...

    def commit(self, step: int, checkpoint_uri: str | None) -> None:
        """Consume the steps up to this one."""
        ...


class CommitOnSave(TrainerCallback, ExportableState):  # pyright: ignore[reportUntypedBaseClass]
    """Commits the trained steps when a checkpoint is saved, and resumes after the one it names.

    The step is part of the checkpoint (`trainer_state.json`), so a crash between the checkpoint and
    its commit trains no group twice.

    Args:
        rollouts: Gives the steps.
    """

    def __init__(self, rollouts: TrainedSteps) -> None:
        self._rollouts = rollouts

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue after the step that the checkpoint names; without one, at the first step."""
        saved = state.stateful_callbacks.get(type(self).__name__) or {}
        self._rollouts.resume(saved.get("attributes", {}).get("trained_step"))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the steps that the checkpoint was trained on."""
        step = self._rollouts.trained_step
        if step is not None and state.is_world_process_zero:
            uri = f"{args.output_dir}/checkpoint-{state.global_step}"
            self._rollouts.commit(step, uri)

    def state(self) -> dict[str, Any]:
        """Return what the checkpoint holds."""
        return {"args": {}, "attributes": {"trained_step": self._rollouts.trained_step}}


def _misfit(batch: TrainBatch, groups: int, n: int) -> str:
    if len(batch.groups) != groups:
        return f"The run has {len(batch.groups)} groups left, the trainer takes {groups}."
    for group in batch.groups:
        if len(group.rollouts) != n:
            return f"Group {group.group_no} has {len(group.rollouts)} usable rollouts, not {n}."
    if batch.rows_missing:
        return f"{batch.rows_missing} rollouts have no recorded token ids."
    return ""


def _columns(rows: Sequence[TokenRow]) -> dict[str, list[Any]]:
    return {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.response_ids.tolist() for row in rows],
        "logprobs": [
            [
                None if value != value else value
                for value in row.logprobs[row.prompt_length :].tolist()
            ]
            for row in rows
        ],
        "env_mask": [row.response_mask.tolist() for row in rows],
        "rollout_reward": [row.reward for row in rows],
        "rollout_id": [str(row.rollout_id) for row in rows],
    }
