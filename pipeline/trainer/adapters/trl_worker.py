"""Train batches for TRL's `AsyncGRPOTrainer`: its `rollout_worker`.

Used in the trainer's main process, where a thread pulls steps and queues their rows. Needs the
extra `trl`. Must not: commit a step of which rows may be untrained.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import numpy as np

from pipeline.contract.advantages import AdvantageKind
from pipeline.contract.train_batch import BatchSpec, NotReady, ResumeInfo
from pipeline.trainer.adapters.row_sources import prompt_messages, row_sources
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.extras import require_extra
from pipeline.trainer.train_batch import TrainBatch, TrainGroup

log = logging.getLogger(__name__)

#: Longest wait for groups or for a free place in the queue, and so of `stop`.
_POLL_S = 1.0


class _CountedQueue(queue.Queue[Any]):
    """Counts the items that were taken."""

    taken = 0

    def _get(self) -> Any:
        self.taken += 1
        return super()._get()


class PipelineRolloutWorker:
    """Queues the rows of a run as `RolloutSample`s, a row for each segment, step after step.

    Implements `RolloutWorkerProtocol`. Give it to `CommitOnSave` (`trl_rollouts.py`), too, which
    resumes and commits. TRL's `weight_transfer` brings the weights to the model servers; the worker
    publishes their version.

    Args:
        client: Pulls the steps.
        spec: The batch of a step.
        held_rows: Rows that the trainer may have taken and not trained yet: those of two
            micro-batches over all processes. A step counts as trained when as many later rows were
            taken.
        advantages: Their kind, over the groups of a step.
        queue_rows: Rows that are queued ahead at most.
    """

    def __init__(
        self,
        client: TrainerClient,
        spec: BatchSpec | None = None,
        *,
        held_rows: int,
        advantages: AdvantageKind = "grpo",
        queue_rows: int = 256,
    ) -> None:
        require_extra("trl", "trl", use="This adapter needs")
        self.rollout_buffer = _CountedQueue(queue_rows)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._client = client
        self._spec = spec or BatchSpec(needs_logprobs=True)
        self._held_rows = held_rows
        self._advantages: AdvantageKind = advantages
        self._resumed: ResumeInfo | None = None
        self._version = 0  #: as the trainer counts: from 0 in each process
        self._ends: dict[int, int] = {}  #: rows queued up to the end of a step, by the step
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-trl", daemon=True)
        self._error: BaseException | None = None
        self._waiting: NotReady | None = None
        self._moved_at = time.monotonic()

    @property
    def trained_step(self) -> int | None:
        """The last step of which all rows were trained."""
        sure = self.rollout_buffer.taken - self._held_rows
        return max((step for step, end in self._ends.items() if end <= sure), default=None)

    def resume(self, committed_step: int | None) -> ResumeInfo:
        """Continue after the step of a checkpoint, which is committed if it is not yet."""
        self._resumed = self._client.resume(committed_step=committed_step)
        return self._resumed

    def commit(self, step: int, checkpoint_uri: str | None) -> None:
        """Consume the steps up to this one."""
        self._client.commit(step, checkpoint_uri=checkpoint_uri)

    def update_model_version(self, model_version: int) -> None:
        """Publish the version of the weights that the servers have now."""
        self._version = model_version
        self._client.publish_policy(self._first_version() + model_version)

    def start(self) -> None:
        """Begin to pull and queue."""
        self._start()
        self._moved_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it pulled stays leased for the next resume."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def check_health(self, stale_after_s: float) -> None:
        """Check that the thread works.

        Raises:
            NotReady: Nothing was ready for this long; it says why, `drained` that the run is over.
            PipelineError: The thread ended with this error.
        """
        if self._error is not None:
            raise self._error
        if self._waiting is not None and time.monotonic() - self._moved_at > stale_after_s:
            raise self._waiting

    def _start(self) -> ResumeInfo:
        if self._resumed is None:
            next_step = self._client.next_step()
            return self.resume(next_step - 1 if next_step else None)
        return self._resumed

    def _first_version(self) -> int:
        """Return the pipeline's version at which the trainer began to count."""
        return self._start().policy_version or 0

    def _run(self) -> None:
        try:
            step = self._start().next_step
            while not self._stopping.is_set():
                batch = self._pull(step)
                if batch is not None:
                    self._queue(batch)
                    step += 1
        except NotReady as error:  # the run is drained
            self._waiting, self._moved_at = error, float("-inf")
        except Exception as error:
            # The trainer asks `check_health`, and raises it in its own thread.
            self._error = error
            log.exception("No further rollouts reach the trainer.")

    def _pull(self, step: int) -> TrainBatch | None:
        version = self._first_version() + self._version
        try:
            return self._client.pull(step, self._spec, policy_version=version, timeout_s=_POLL_S)
        except NotReady as error:
            if error.drained:
                raise
            self._waiting = error
            return None

    def _queue(self, batch: TrainBatch) -> None:
        for sample in self._samples(batch):
            while not self._stopping.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            self._waiting, self._moved_at = None, time.monotonic()
        queued = max(self._ends.values(), default=0)
        self._ends[batch.step] = queued + len(batch.rows())

    def _samples(self, batch: TrainBatch) -> Any:
        # Of TRL's own class, because the trainer's data set reads its attributes.
        from trl.experimental.async_grpo.async_rollout_worker import (  # type: ignore[import-not-found]
            RolloutSample,
        )

        advantages = batch.advantages(self._advantages)
        for row, group, _ in row_sources(batch):
            yield RolloutSample(
                prompt=prompt_messages(group),
                completion=[],
                input_ids=row.token_ids.astype(np.int64),
                completion_mask=row.loss_mask.astype(np.int64),
                old_log_probs=row.logprobs,
                advantage=advantages[row.rollout_id],
                model_version=self._trainer_version(group),
                group_id=group.group_no,
                metrics={"reward": row.reward, "reward_std": group.reward_std},
                enqueued_at=time.time(),
            )

    def _trainer_version(self, group: TrainGroup) -> int:
        """Return the oldest version of a group as the trainer counts; unknown ones are current."""
        known = [each.version_min for each in group.rollouts if each.version_min is not None]
        return min(known) - self._first_version() if known else self._version
