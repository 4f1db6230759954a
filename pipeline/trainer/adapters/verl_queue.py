"""Train batches in verl's TransferQueue (V1): a manager that pulls instead of generating.

verl makes the manager and the callback by the names of their classes. Needs the extra `verl`, whose
import takes seconds. Must not: publish a group before its rows, or commit what is not durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec
from pipeline.tokens.rows import TokenRow
from pipeline.trainer.adapters import E_UNFIT
from pipeline.trainer.adapters.verl_rows import described_rows
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.extras import require_extra
from pipeline.trainer.train_batch import TrainBatch


def put_batch(
    batch: TrainBatch, uids: Sequence[str], *, global_steps: int, partition_id: str = "train"
) -> None:
    """Put the groups of a batch into the TransferQueue, from where verl's replay buffer takes them.

    Rows have the keys `{uid}_{number of the rollout}_{segment_index}`, and unpadded tensors. The
    status of a group is written after its rows.

    Args:
        batch: A leased batch.
        uids: verl's id for each group, in their order; without `_`, which separates the key.
        global_steps: verl's trainer step.
        partition_id: The queue's partition.

    Raises:
        MissingExtra: verl or TransferQueue is not installed.
        InputError: The ids do not fit; or a rollout has no reward.
    """
    require_extra("verl", "verl", use="The queue needs")
    require_extra("transfer_queue", "verl", use="The queue needs")
    import transfer_queue as tq  # type: ignore[import-not-found]
    from verl.utils.tensordict_utils import (  # type: ignore[import-not-found]
        list_of_dict_to_tensordict,
    )

    if len(uids) != len(batch.groups) or any("_" in uid for uid in uids):
        raise InputError(
            f"{len(uids)} ids do not fit the {len(batch.groups)} groups of step {batch.step}.",
            why="verl separates the parts of a key by `_`.",
            remedy="Give one id for each group, such as a UUID.",
            code=E_UNFIT,
        )
    uid_of = {group.group_id: uid for group, uid in zip(batch.groups, uids, strict=True)}
    number_of = {rollout.rollout_id: rollout.rollout_index for rollout in batch.rollouts()}
    described = list(described_rows(batch))
    has_logprobs = all(row.has_logprobs for row, _ in described)
    keys, fields, tags = [], [], []
    for row, other in described:
        uid = uid_of[row.group_id]
        keys.append(f"{uid}_{number_of[row.rollout_id]}_{row.segment_index}")
        fields.append(_fields(row, uid, global_steps, other, has_logprobs=has_logprobs))
        tags.append(_tag(row, global_steps, other))
    if keys:
        tq.kv_batch_put(
            keys=keys,
            partition_id=partition_id,
            fields=list_of_dict_to_tensordict(fields),
            tags=tags,
        )
    finished = {"is_prompt": True, "status": "finished", "global_steps": global_steps}
    tq.kv_batch_put(keys=list(uids), partition_id=partition_id, tags=[dict(finished) for _ in uids])


class PipelineManager:
    """verl's agent loop manager: for each batch of prompts it puts as many groups of the run.

    Named in `actor_rollout_ref.rollout.agent.agent_loop_manager_class`; for verl's trainer mode
    `sync`. The prompts of verl's data set are not used. verl's `global_steps` is the trainer step.

    Args:
        client: Pulls the steps.
        spec: Its `groups` follow from verl's batch size.
        timeout_s: Longest wait for a batch.
    """

    def __init__(
        self, client: TrainerClient, spec: BatchSpec | None = None, *, timeout_s: float = 600.0
    ) -> None:
        self._client = client
        self._spec = spec or BatchSpec()
        self._timeout_s = timeout_s
        self._step: int | None = None

    @classmethod
    def create(cls, config: Any, **_: Any) -> PipelineManager:
        """Return a manager as `rollout.custom` of the configuration names it.

        Its `run` is required. Without them `consumer` is `verl`, `segments` is `all` and
        `timeout_s` is 600.

        Raises:
            InputError: No run is named.
        """
        custom = dict(config.actor_rollout_ref.rollout.get("custom") or {})
        if "run" not in custom:
            raise InputError(
                "verl's configuration names no run.",
                remedy="Add +actor_rollout_ref.rollout.custom.run=NAME.",
                code=E_UNFIT,
            )
        client = TrainerClient.connect(custom["run"], consumer=custom.get("consumer", "verl"))
        spec = BatchSpec(segments=custom.get("segments", "all"))
        return cls(client, spec, timeout_s=float(custom.get("timeout_s", 600.0)))

    def generate_sequences(self, prompts: Any) -> None:
        """Pull a group for each prompt, and put it under the prompt's id; returns afterwards.

        Args:
            prompts: verl's batch, with `uid` and `global_steps`.

        Raises:
            NotReady: No batch was ready in time, or the run has no more.
            NotAllowed: verl validates, or asks for a second batch of a step, or the run's last
                groups are fewer than the prompts.
        """
        # verl's batch is a TensorDict, whose `get` returns a wrapper that has no truth value.
        if "validate" in set(prompts.keys()) and prompts["validate"]:
            raise _unfit(
                "verl asked for rollouts of a validation.",
                "A run has rollouts to train on.",
                "Set trainer.val_before_train=False and trainer.test_freq=-1.",
            )
        uids, step = [str(uid) for uid in prompts["uid"]], int(prompts["global_steps"])
        if step == self._step:
            raise _unfit(
                f"verl asked for a second batch in its step {step}.",
                "A trainer step has one batch.",
                "Use trainer mode sync without filter_groups; BatchSpec.filter_zero_variance "
                "leaves out groups with equal rewards.",
            )
        if self._step is None:
            # verl has loaded the checkpoint of the step before, or begins.
            self._client.resume(committed_step=step - 1 if step > 1 else None)
        batch = self._pull(step, groups=len(uids))
        put_batch(batch, uids, global_steps=step)
        self._step = step

    def commit(self, step: int, checkpoint_uri: str) -> None:
        """Consume the steps up to this one."""
        self._client.commit(step, checkpoint_uri=checkpoint_uri)

    def _pull(self, step: int, *, groups: int) -> TrainBatch:
        spec = replace(self._spec, groups=groups)
        batch = self._client.pull(step, spec, timeout_s=self._timeout_s)
        if len(batch.groups) != groups:
            why = f"The run has {len(batch.groups)} groups left, verl takes {groups}."
            self._client.abandon(step, reason=why)
            raise _unfit(
                f"Step {step} of run {batch.run} does not fill verl's batch.",
                why,
                "Set trainer.total_training_steps to the number of full batches.",
            )
        return batch


class CommitOnSave:
    """verl's checkpoint callback: commits the steps of a checkpoint when it is durable.

    Named in `trainer.checkpoint_callback_class`, beside `PipelineManager`. A checkpoint that is
    still being written is committed when training resumes from it.
    """

    def __init__(self, config: Any = None) -> None:
        del config  # verl gives it to each callback

    def on_save(
        self,
        trainer: Any,
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,
        **_: Any,
    ) -> None:
        """Commit the steps up to the checkpoint's."""
        if not async_save:
            trainer.agent_loop_manager.commit(global_step, checkpoint_dir)


def _fields(
    row: TokenRow, uid: str, global_steps: int, other: dict[str, Any], *, has_logprobs: bool
) -> dict[str, Any]:
    import torch  # type: ignore[import-not-found]

    mask = torch.tensor(row.response_mask, dtype=torch.int64)
    scores = torch.zeros(len(mask), dtype=torch.float32)
    scores[-1] = row.reward
    fields = {
        "prompts": torch.tensor(row.prompt_ids, dtype=torch.int64),
        "responses": torch.tensor(row.response_ids, dtype=torch.int64),
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": torch.tensor(row.token_ids, dtype=torch.int64),
        "position_ids": torch.arange(len(row.token_ids)),
        "rm_scores": scores,
        "uid": uid,
        "global_steps": global_steps,
        **other,
        "extra_fields": {
            "min_global_steps": other["min_global_steps"],
            "max_global_steps": other["max_global_steps"],
            "reward_extra_info": {},
        },
    }
    if has_logprobs:
        fields["rollout_log_probs"] = torch.tensor(row.response_logprobs, dtype=torch.float32)
    return fields


def _tag(row: TokenRow, global_steps: int, other: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": "success",
        "prompt_len": len(row.prompt_ids),
        "response_len": len(row.response_ids),
        "seq_len": len(row.token_ids),
        "global_steps": global_steps,
        "min_global_steps": other["min_global_steps"],
        "max_global_steps": other["max_global_steps"],
    }


def _unfit(what: str, why: str, remedy: str) -> NotAllowed:
    return NotAllowed(what, why=why, remedy=remedy, code=E_UNFIT)
