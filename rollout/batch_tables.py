"""The output of `rollout pull`: a train batch as a table or a document. The demo prints one too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.output import note, number, print_json, print_table
from rollout.tables import prompt_preview

if TYPE_CHECKING:
    from pipeline.trainer.train_batch import TrainBatch


def print_pulled(batch: TrainBatch, *, as_json: bool) -> None:
    """Print the output of `rollout pull`: a document, or a table and the command to commit."""
    if as_json:
        print_json(_document(batch))
        return
    print_batch(batch)
    note(
        f"When its checkpoint is durable: rollout commit {batch.run} --consumer "
        f"{batch.consumer} --step {batch.step}"
    )


def print_batch(batch: TrainBatch) -> None:
    """Print one line per group of a batch."""
    again = ", again" if batch.replayed else ""
    print_table(
        ("group", "rollouts", "rewards", "mean", "std", "prompt"),
        [
            (
                f"g{group.group_no:06d}",
                f"{len(group.rollouts)}/{group.n_target}",
                " ".join(number(rollout.reward, 2) for rollout in group.rollouts),
                number(group.reward_mean, 2),
                number(group.reward_std, 2),
                prompt_preview(group.prompt),
            )
            for group in batch.groups
        ],
        title=f"{batch.run}, step {batch.step} of {batch.consumer}{again}",
        right=("mean", "std"),
    )


def _document(batch: TrainBatch) -> dict[str, Any]:
    return {
        "step": batch.step,
        "groups": [
            {
                "group_id": str(group.group_id),
                "prompt": group.prompt,
                "rollouts": [
                    {
                        "rollout_id": str(rollout.rollout_id),
                        "reward": rollout.reward,
                        "stop_reason": rollout.stop_reason,
                        "messages": rollout.messages,
                    }
                    for rollout in group.rollouts
                ],
            }
            for group in batch.groups
        ],
        "replayed": batch.replayed,
    }
