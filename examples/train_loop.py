"""A whole trainer loop: pull, update, checkpoint, commit, and go on after a crash.

    rollout run questions.jsonl --run sums --agent react --tools calculator --reward numeric -n 4
    python examples/train_loop.py sums

The update is a stand-in for your optimizer step: `TabularPolicy` is a table of preferences for
answers, updated by the policy gradient of its softmax. No language model is trained. A real trainer
keeps the rest of the loop.

After a crash the loop continues at its checkpoint: a step whose checkpoint was written is committed
and not trained again; any other step is pulled again, with the same groups in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contract.train_batch import BatchSpec
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch, TrainGroup

LEARNING_RATE = 0.5


@dataclass
class TabularPolicy:
    """Preferences for the answers to each question; unseen ones are 0."""

    preferences: dict[str, dict[str, float]] = field(default_factory=dict)

    def probabilities(self, question: str, answers: Iterable[str]) -> dict[str, float]:
        """Return the softmax over some answers."""
        known = self.preferences.get(question, {})
        weights = {answer: math.exp(known.get(answer, 0.0)) for answer in answers}
        total = sum(weights.values())
        return {answer: weight / total for answer, weight in weights.items()}

    def update(self, group: TrainGroup) -> None:
        """Add the policy gradient of one group, with its mean reward as the baseline."""
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        answers = [rollout.record.final_answer for rollout in scored]
        question = str(group.prompt.get("content"))
        chosen = self.probabilities(question, answers)
        table = self.preferences.setdefault(question, {})
        mean = sum(rollout.reward or 0.0 for rollout in scored) / max(1, len(scored))
        for rollout, answer in zip(scored, answers, strict=True):
            advantage = (rollout.reward or 0.0) - mean
            for other, probability in chosen.items():
                gradient = (other == answer) - probability
                table[other] = table.get(other, 0.0) + LEARNING_RATE * advantage * gradient


@dataclass
class Checkpoint:
    """The policy and its last step, in one file that is replaced atomically."""

    path: Path
    step: int | None = None
    policy: TabularPolicy = field(default_factory=TabularPolicy)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read the file; without a file, training starts at the beginning."""
        if not path.exists():
            return cls(path)
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, stored["step"], TabularPolicy(stored["preferences"]))

    def save(self, step: int) -> None:
        """Replace the file atomically; when the function returns, the file is durable."""
        self.step = step
        part = self.path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump({"step": step, "preferences": self.policy.preferences}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def train(client: TrainerClient, checkpoint: Checkpoint, spec: BatchSpec) -> int:
    """Train until the run has no more groups; return the number of steps."""
    # Commits the checkpoint's step if the last process ended between checkpoint and commit.
    resumed = client.resume(committed_step=checkpoint.step)
    steps = 0
    for batch in client.stream(spec, start_step=resumed.next_step):
        for group in batch.groups:
            checkpoint.policy.update(group)
        checkpoint.save(batch.step)
        client.commit(batch.step, checkpoint_uri=checkpoint.path.resolve().as_uri())
        steps += 1
        print(describe(batch))
    return steps


def describe(batch: TrainBatch) -> str:
    """Describe a step in one line."""
    rewards = [r.reward for r in batch.rollouts() if r.reward is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    again = ", pulled again" if batch.replayed else ""
    return f"step {batch.step}: {len(batch.groups)} groups, {mean}{again}"


def main(arguments: list[str] | None = None) -> None:
    """Train on one run."""
    parser = argparse.ArgumentParser(description="Train a table of preferences on a run.")
    parser.add_argument("run")
    parser.add_argument("--consumer", default="trainer", help="the name of this trainer")
    parser.add_argument("--groups", type=int, default=16, help="groups of a step")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.json"))
    options = parser.parse_args(arguments)
    client = TrainerClient.connect(options.run, consumer=options.consumer)
    try:
        checkpoint = Checkpoint.load(options.checkpoint)
        steps = train(client, checkpoint, BatchSpec(groups=options.groups))
    finally:
        client.close()
    print(f"{steps} steps of run {options.run}; the checkpoint is {options.checkpoint}.")


if __name__ == "__main__":
    main()
