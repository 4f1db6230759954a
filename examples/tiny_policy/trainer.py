"""The trainer process: enqueue, pull, update, checkpoint, commit, and hand over the weights.

    cd examples; python -m tiny_policy.trainer CHECKPOINT --policy-url URL --steps 25 --seed 0

It may be killed at any point and started again. The checkpoint decides: a step that is in it is
committed and not trained again. Any other step is enqueued again, which adds nothing, and pulled
again, which gives the same groups. Each line on stdout is a JSON object that says what was reached.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.trainer.train_batch import TrainBatch
from rollout import BatchSpec, TrainerClient
from rollout.signals import end_with_stdin
from tiny_policy.checkpoint import Checkpoint, TrainedStep
from tiny_policy.learning import grpo_gradient, pad
from tiny_policy.model import Transformer
from tiny_policy.runs import GROUPS, RUN, enqueue_problems, open_store
from tiny_policy.task import problems

_LEARNING_RATE = 8e-4
#: Passes over a batch, and parts of it that each make one step of Adam.
_PASSES, _PARTS = 2, 4
_WAIT_S = 120.0
#: Each step trains on rollouts of the newest weights alone: none may be stale.
_SPEC = BatchSpec(groups=GROUPS, max_staleness=0, segments="error", needs_logprobs=True)


class Trainer:
    """Trains the policy on one run.

    Args:
        path: The checkpoint, which exists.
        policy_url: Base URL of the policy server.
        steps: Steps of the whole training; the learning rate falls to 0 over them.
        seed: Chooses the problems and the order of the rows.
    """

    def __init__(self, path: Path, policy_url: str, *, steps: int, seed: int) -> None:
        self._path = path
        self._policy_url = policy_url
        self._steps = steps
        self._seed = seed
        self._store = open_store()
        self._checkpoint = Checkpoint.load(path)

    def train(self) -> None:
        """Train until the last step is committed."""
        # Makes sure that the run exists.
        self._enqueue(self._checkpoint.step or 0)
        client = TrainerClient(self._store, run=RUN)
        try:
            # The process before this one may have ended before it handed over its last weights.
            self._hand_over_weights(client)
            # Commits the checkpoint's step if the process before this one had not done so.
            resumed = client.resume(committed_step=self._checkpoint.step)
            for step in range(resumed.next_step, self._steps):
                self._train_step(client, step)
        finally:
            client.close()

    def _train_step(self, client: TrainerClient, step: int) -> None:
        self._enqueue(step)
        _report("enqueued", step)
        version = self._checkpoint.version
        batch = client.pull(step, _SPEC, policy_version=version, timeout_s=_WAIT_S)
        _report("pulled", step, replayed=batch.replayed)
        self._update(batch)
        self._checkpoint.history.append(_trained(batch))
        self._checkpoint.save(self._path)
        _report("checkpointed", step)
        client.commit(step, checkpoint_uri=self._path.resolve().as_uri())
        self._hand_over_weights(client)
        _report("committed", step, mean_reward=self._checkpoint.history[-1].mean_reward)

    def _enqueue(self, step: int) -> None:
        """Enqueue the prompts of a step, unless they are enqueued already."""
        rng = np.random.default_rng([self._seed, step])
        enqueue_problems(
            self._store,
            RUN,
            problems(rng, GROUPS),
            model_url=self._policy_url,
            step=step,
            seed=self._seed,
        )

    def _update(self, batch: TrainBatch) -> None:
        """Change the weights by GRPO: several passes over the rows, in shuffled parts."""
        # Groups are leased in the order in which they became ready. Sorted, the sums of their
        # gradients do not depend on it, so equal seeds give equal curves.
        groups = sorted(batch.groups, key=lambda group: group.group_no)
        place = {group.group_id: index for index, group in enumerate(groups)}
        advantage = batch.advantages("grpo")
        rows = sorted(batch.rows(), key=lambda row: place[row.group_id])
        # Position t of the logits predicts the token at t + 1.
        tokens = pad([row.token_ids for row in rows], np.int64)
        targets = tokens[:, 1:]
        mask = pad([row.loss_mask[1:] for row in rows])
        logprobs = pad([row.logprobs[1:] for row in rows])
        advantages = np.array([advantage[row.rollout_id] for row in rows], np.float32)
        checkpoint, model = self._checkpoint, Transformer(self._checkpoint.parameters)
        rate = _LEARNING_RATE * (1 - batch.step / self._steps)
        for part in _parts(len(rows), np.random.default_rng([self._seed, batch.step])):
            logits, saved = model.forward(tokens[part, :-1])
            d_logits = grpo_gradient(
                logits,
                targets[part],
                mask[part],
                old_logprobs=logprobs[part],
                advantages=advantages[part],
                tokens=mask.sum() / _PARTS,
            )
            checkpoint.adam.update(checkpoint.parameters, model.backward(d_logits, saved), rate)

    def _hand_over_weights(self, client: TrainerClient) -> None:
        """Let the server load the checkpoint, and make its version the current one."""
        body = json.dumps({"path": str(self._path.resolve())}).encode()
        url = self._policy_url.removesuffix("/v1") + "/weights"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
            answer.read()
        client.publish_policy(self._checkpoint.version, uri=self._path.resolve().as_uri())


def _parts(rows: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for _ in range(_PASSES):
        yield from np.array_split(rng.permutation(rows), _PARTS)


def _trained(batch: TrainBatch) -> TrainedStep:
    rewards = [rollout.reward for rollout in batch.rollouts() if rollout.reward is not None]
    return TrainedStep(
        batch.step, float(np.mean(rewards)), sorted(str(group.group_id) for group in batch.groups)
    )


def _report(event: str, step: int, **more: object) -> None:
    print(json.dumps({"event": event, "step": step, **more}), flush=True)


def main() -> None:
    """Train as the options say."""
    parser = argparse.ArgumentParser(description="Train the tiny policy.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--policy-url", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    trainer = Trainer(
        options.checkpoint, options.policy_url, steps=options.steps, seed=options.seed
    )
    trainer.train()


if __name__ == "__main__":
    end_with_stdin()
    main()
