"""Train batches as a `torch.utils.data.IterableDataset`: one iteration gives one trainer step.

Used by training loops in torch. Needs the extra `torch`. Must not: commit a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.contract.advantages import AdvantageKind
from pipeline.contract.errors import NotAllowed
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.tokens.rows import TokenRow
from pipeline.trainer.adapters import E_UNFIT
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.extras import require_extra

require_extra("torch", "torch", use="This data set needs")

import torch  # type: ignore[import-not-found]  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # type: ignore[import-not-found]  # noqa: E402
from torch.utils.data import (  # type: ignore[import-not-found]  # noqa: E402
    IterableDataset,
    get_worker_info,
)

_ARRAYS = {"token_ids": torch.int64, "loss_mask": torch.int64, "logprobs": torch.float32}


class RolloutIterableDataset(IterableDataset):  # pyright: ignore[reportUntypedBaseClass]
    """The rows of a run, one for each segment; each iteration pulls the next trainer step.

    A row is a dict: `token_ids`, `loss_mask` (int64), `logprobs` (float32), `versions` (int64), all
    of one length; `advantage`, `reward` (None without one), `prompt_length`, `step`, `group_id`,
    `rollout_id`, `segment_index`. An iteration that is left early is repeated by the next one.

    Args:
        client: Pulls the steps; the caller commits `last_step` with it.
        spec: The batch of a step.
        start_step: The first step; None: the one after the last that was committed.
        advantages: Their kind, over the whole batch; None: no advantages.
        rank: This process's shard of the rows; all ranks use one consumer name.
        world_size: Number of shards. Their numbers of rows differ by one at most.
        policy_version: Returns the version of the weights being trained; None: no check.
        timeout_s: Longest wait for a batch.
    """

    def __init__(
        self,
        client: TrainerClient,
        spec: BatchSpec | None = None,
        *,
        start_step: int | None = None,
        advantages: AdvantageKind | None = "grpo",
        rank: int = 0,
        world_size: int = 1,
        policy_version: Callable[[], int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._client = client
        self._spec = spec
        self._advantages: AdvantageKind | None = advantages
        self._rank, self._world_size = rank, world_size
        self._policy_version = policy_version
        self._timeout_s = timeout_s
        self._step = client.next_step() if start_step is None else start_step
        self.last_step: int | None = None  #: the last step whose rows were all given
        self.drained = False  #: whether the run has no further groups

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of one step; none if the run is drained.

        Raises:
            NotReady: No batch was ready in time.
            NotAllowed: A `DataLoader` has worker processes.
        """
        if get_worker_info() is not None:
            raise NotAllowed(
                "A DataLoader with worker processes cannot read a run.",
                why="Each of them would give the rows of the same step again.",
                remedy="Use num_workers=0; AsyncTrainerClient.prefetch reads ahead.",
                code=E_UNFIT,
            )
        version = None if self._policy_version is None else self._policy_version()
        try:
            batch = self._client.pull(
                self._step, self._spec, policy_version=version, timeout_s=self._timeout_s
            )
        except NotReady as error:
            if not error.drained:
                raise
            self.drained = True
            return
        values = {} if self._advantages is None else batch.advantages(self._advantages)
        for row in batch.shard(self._rank, self._world_size).rows():
            yield _item(row, batch.step, values.get(row.rollout_id))
        self.last_step, self._step = batch.step, batch.step + 1


class PaddedRows:
    """A `collate_fn`: rows as tensors of one width, padded at the right.

    Gives `token_ids`, `attention_mask`, `loss_mask` int64 [B,T], `logprobs` float32 [B,T], and
    `advantages` float32 [B] if the rows have them. Padding has mask 0.

    Args:
        pad_id: The token for padding.
    """

    def __init__(self, pad_id: int = 0) -> None:
        self._pad_id = pad_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the rows as one batch."""
        batch = {
            name: pad_sequence(
                [item[name] for item in items],
                batch_first=True,
                padding_value=self._pad_id if name == "token_ids" else 0,
            )
            for name in _ARRAYS
        }
        lengths = torch.tensor([len(item["token_ids"]) for item in items])
        width = batch["token_ids"].shape[1]
        batch["attention_mask"] = (torch.arange(width)[None] < lengths[:, None]).long()
        if all(item["advantage"] is not None for item in items):
            batch["advantages"] = torch.tensor([item["advantage"] for item in items])
        return batch


def _item(row: TokenRow, step: int, advantage: float | None) -> dict[str, Any]:
    return {
        **{name: torch.tensor(getattr(row, name), dtype=kind) for name, kind in _ARRAYS.items()},
        "versions": torch.tensor(row.versions, dtype=torch.int64),
        "advantage": advantage,
        "reward": row.reward,
        "prompt_length": row.prompt_length,
        "step": step,
        "group_id": str(row.group_id),
        "rollout_id": str(row.rollout_id),
        "segment_index": row.segment_index,
    }
