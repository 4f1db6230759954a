"""Values of the trainer client: batch spec, groups with their rollouts, reasons for waiting.

Used by the trainer client and the command line. Must not: touch the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import UUID

from pipeline.contract.errors import PipelineError
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record


@dataclass(frozen=True)
class BatchSpec:
    """The batch that one trainer step asks for.

    Args:
        groups: Groups in a batch.
        min_group_size: Usable rollouts that a group must have; capped at the group's n.
        require_full_groups: Skip groups with fewer than n usable rollouts.
    """

    groups: int = 16
    min_group_size: int = 2
    require_full_groups: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1 or self.min_group_size < 1:
            raise ValueError("groups and min_group_size must be at least 1")


@dataclass(frozen=True)
class TrainRollout:
    """A succeeded rollout of a train batch; its trajectory is unpacked when first read."""

    rollout_id: UUID
    rollout_index: int
    reward: float | None
    stop_reason: str | None
    attempt_no: int
    body: bytes = field(repr=False)
    codec: str = "zstd+json"
    version_min: int | None = None
    version_max: int | None = None

    @cached_property
    def record(self) -> TrajectoryRecord:
        """The stored trajectory."""
        return unpack_record(self.body, self.codec)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the OpenAI format."""
        return self.record.messages


@dataclass(frozen=True)
class TrainGroup:
    """A complete group: one prompt and its usable rollouts, by index."""

    group_id: UUID
    group_no: int
    n_target: int
    prompt: dict[str, Any]
    rollouts: tuple[TrainRollout, ...]
    reward_mean: float | None
    reward_std: float | None


@dataclass(frozen=True)
class TrainBatch:
    """The groups that one `(run, consumer, step)` leased; a second pull gives the same batch."""

    run: str
    consumer: str
    step: int
    groups: tuple[TrainGroup, ...]
    replayed: bool

    def rollouts(self) -> Iterator[TrainRollout]:
        """Yield all rollouts, group by group."""
        for group in self.groups:
            yield from group.rollouts


@dataclass(frozen=True)
class PipelineStats:
    """The progress of a run: counts by state, and the reasons for waiting."""

    run: str
    state: str
    groups: dict[str, int]
    rollouts: dict[str, int]
    errors: dict[str, int]
    drops: dict[str, int]
    oldest_running_s: float | None
    live_workers: int
    waits: tuple[str, ...]
    leased_elsewhere: int = 0  #: groups leased to other consumers, which may give them back

    @property
    def drained(self) -> bool:
        """Whether no further group can become ready, also none that another consumer has leased."""
        is_over = self.state in ("finished", "cancelled")
        return is_over and not self.groups["ready"] and not self.leased_elsewhere


@dataclass(frozen=True)
class ResumeInfo:
    """The step at which a trainer continues after a restart.

    `replay` lists steps that were pulled but not committed: pulling them gives the same batches.
    """

    committed_step: int | None
    next_step: int
    replay: tuple[int, ...]


class NotReady(PipelineError):
    """No batch is ready; `stats` holds the reasons."""

    code = "E141"
    exit_code = 5

    def __init__(self, stats: PipelineStats, *, wanted: int) -> None:
        what = (
            f"Run {stats.run} has no further groups: all are consumed or dropped."
            if stats.drained
            else f"Run {stats.run} has {stats.groups['ready']} of {wanted} groups ready."
        )
        why = list(stats.waits)
        if stats.leased_elsewhere:
            why.append(f"{stats.leased_elsewhere} groups are leased to other consumers.")
        super().__init__(what, why=" ".join(why), remedy=_remedy(stats))
        self.stats = stats

    @property
    def drained(self) -> bool:
        """Whether no further group can become ready, so that waiting is of no use."""
        return self.stats.drained


def _remedy(stats: PipelineStats) -> str:
    if stats.drained:
        return "Enqueue more prompts, or stop training."
    return f"See: rollout status {stats.run}"
