"""Values of the trainer client: the batch that a step asks for, and the reasons for waiting.

Used by the store, the trainer client and the command line. Must not: touch the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.contract.errors import PipelineError

SegmentChoice = Literal["all", "last", "longest", "error"]
TruncatedChoice = Literal["train", "mask_turn", "drop"]

Order = Literal["oldest_version", "fifo"]
#: Reasons of drops after which a prompt can be enqueued afresh.
Requeue = Literal["stale", "zero_variance"]

#: What becomes of the steps after a checkpoint.
Later = Literal["replay", "ready", "afresh"]
#: Given a step, the version of the weights that it trains; None: no group is too old.
VersionOfStep = Callable[[int], int | None]

DEFAULT_GROUPS = 16
DEFAULT_STALENESS = 4


def no_version(step: int) -> None:
    """Let no group be too old, whatever the step."""


@dataclass(frozen=True)
class BatchSpec:
    """The batch that one trainer step asks for.

    Args:
        groups: Groups in a batch; 16 if neither `groups` nor `tokens` is given.
        tokens: Instead of `groups`: the batch ends with the group with which its usable rollouts
            have this many sampled tokens, by their server's usage, or else by the recorded ids.
        min_group_size: Usable rollouts that a group must have; capped at the group's n.
        require_full_groups: Skip groups with fewer than n usable rollouts.
        segments: Segments of a rollout that become rows: `all`, the `last`, the `longest`, or
            `error` if there are several.
        needs_logprobs: A rollout without ids or logprobs is an error of `TrainBatch.rows`.
        truncated: Completions that a limit of tokens cut off: `train` on them, keep them as context
            (`mask_turn`), or `drop` their segments.
        group_deadline_s: Seconds from a group's first dispatch after which it is closed with the
            rollouts it has, while the trainer waits; None: the run's own deadline.
        max_staleness: Versions that a group may be behind the version given to `pull`; older ones
            are dropped as `stale`. None: any number. The run's `max_staleness` bounds it.
        filter_zero_variance: Drop groups in which all rewards are equal, as `zero_variance`.
        requeue: Reasons of drops after which the prompt is enqueued afresh, in a new group.
        order: `oldest_version`: the groups of the oldest weights first; `fifo`: in the order in
            which they became ready.
    """

    groups: int | None = None
    tokens: int | None = None
    min_group_size: int = 2
    require_full_groups: bool = False
    segments: SegmentChoice = "all"
    needs_logprobs: bool = False
    truncated: TruncatedChoice = "train"
    group_deadline_s: float | None = None
    max_staleness: int | None = DEFAULT_STALENESS
    filter_zero_variance: bool = False
    requeue: tuple[Requeue, ...] = ()
    order: Order = "oldest_version"

    def __post_init__(self) -> None:
        if self.groups is None and self.tokens is None:
            object.__setattr__(self, "groups", DEFAULT_GROUPS)
        if self.groups is not None and self.tokens is not None:
            raise ValueError("groups and tokens exclude each other: give one of them")
        for name in ("groups", "tokens", "min_group_size"):
            if (least := getattr(self, name)) is not None and least < 1:
                raise ValueError(f"{name} must be at least 1")
        for name, choices in (("segments", SegmentChoice), ("truncated", TruncatedChoice)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError("max_staleness must be at least 0, or None")
        if self.group_deadline_s is not None and self.group_deadline_s <= 0:
            raise ValueError("group_deadline_s must be above 0, or None")
        if self.group_deadline_s is not None and self.require_full_groups:
            raise ValueError(
                "require_full_groups and group_deadline_s exclude each other: a group that is "
                "closed at its deadline is not full"
            )
        if self.order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(get_args(Order))}")
        if unknown := set(self.requeue) - set(get_args(Requeue)):
            raise ValueError(f"requeue knows {', '.join(get_args(Requeue))}, not {unknown}")


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
    too_small: int = 0  #: ready groups with too few usable rollouts for the batch
    why: str | None = None  #: why the trainer waits, in one sentence
    #: Groups dropped as `zero_variance`, by the reward that all their rollouts have.
    equal_rewards: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def drained(self) -> bool:
        """Whether no further group can become ready, also none that another consumer has leased.

        Groups that are too small for the batch do not count.
        """
        is_over = self.state in ("finished", "cancelled")
        usable = self.groups["ready"] - self.too_small
        return is_over and usable <= 0 and not self.leased_elsewhere


@dataclass(frozen=True)
class ResumeInfo:
    """The step at which a trainer continues after a restart.

    `replay` lists later steps that were pulled: pulling them again gives the same batches.
    """

    committed_step: int | None
    next_step: int
    replay: tuple[int, ...]
    groups_returned: int = 0  #: of later steps, ready again or enqueued afresh
    policy_version: int | None = None  #: published last; the next one has to be higher


class NotReady(PipelineError):
    """No batch is ready; `stats` holds the reasons."""

    code = "E141"
    exit_code = 5

    def __init__(self, stats: PipelineStats, spec: BatchSpec) -> None:
        ready = stats.groups["ready"] - stats.too_small
        if stats.drained:
            small = f", and {stats.too_small} too small for the batch" if stats.too_small else ""
            what = f"Run {stats.run} has no further groups: all are consumed or dropped{small}."
        elif spec.tokens is None:
            what = f"Run {stats.run} has {ready} of {spec.groups} groups ready."
        else:
            what = f"Run {stats.run} has too few groups ready for {spec.tokens} tokens: {ready}."
        why = [stats.why or "", *stats.waits]
        super().__init__(what, why=" ".join(filter(None, why)), remedy=_remedy(stats))
        self.stats = stats

    @property
    def drained(self) -> bool:
        """Whether no further group can become ready, so that waiting is of no use."""
        return self.stats.drained


def _remedy(stats: PipelineStats) -> str:
    if stats.drained:
        return "Enqueue more prompts, or stop training."
    return f"See: rollout why {stats.run}"
