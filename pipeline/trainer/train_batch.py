"""The batch that a trainer gets: groups with their rollouts, and their tokens as rows.

Made by `batches.py`. A rollout with tokens is read without its body; the body is fetched when the
trajectory is first asked for. Must not: lease or change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import UUID

from pipeline.contract.advantages import AdvantageKind, advantages_of
from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.tokens.rows import TokenRow, rows_of
from pipeline.tokens.segments import Segment, Segments, choose_segments, merge_calls
from pipeline.tokens.token_body import SampledCall, unpack_tokens

E_TOKENS = "E135"


@dataclass(frozen=True)
class TrainRollout:
    """A succeeded rollout of a train batch; its trajectory and tokens are unpacked when first read.

    Reading `body`, `record` or `messages` of a rollout with tokens fetches the body. Pickling a
    rollout does so, too.
    """

    rollout_id: UUID
    rollout_index: int
    reward: float | None
    stop_reason: str | None
    attempt_no: int
    tokens: bytes = field(default=b"", repr=False)
    codec: str = "zstd+json"
    version_min: int | None = None
    version_max: int | None = None
    _read_body: Callable[[], bytes] = field(default=bytes, repr=False, compare=False)

    @cached_property
    def body(self) -> bytes:
        """The stored bytes of the trajectory.

        Raises:
            UnreadableBody: They are gone or damaged.
            ServiceUnavailable: The store or the payload store does not answer.
        """
        return self._read_body()

    @cached_property
    def record(self) -> TrajectoryRecord:
        """The stored trajectory."""
        return unpack_record(self.body, self.codec)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the OpenAI format."""
        return self.record.messages

    @cached_property
    def calls(self) -> list[SampledCall]:
        """The tokens of each model call; empty if the server recorded no ids."""
        return unpack_tokens(self.tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "body": self.body, "_read_body": bytes}


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
    spec: BatchSpec = field(default_factory=BatchSpec)

    def rollouts(self) -> Iterator[TrainRollout]:
        """Yield all rollouts, group by group."""
        for group in self.groups:
            yield from group.rollouts

    def rows(self) -> list[TokenRow]:
        """Return the tokens to train on: one row for each segment, rollout by rollout.

        A reward belongs to a rollout: compute advantages per rollout, and use them for each of its
        rows. Rollouts without ids give no row; `rows_missing` counts them.

        Raises:
            NotAllowed: The spec needs logprobs and a rollout has none, or allows one segment and a
                rollout has several.
        """
        return self._rows

    @property
    def rows_missing(self) -> int:
        """Rollouts that give no row."""
        found = {row.rollout_id for row in self.rows()}
        return sum(rollout.rollout_id not in found for rollout in self.rollouts())

    def advantages(self, kind: AdvantageKind = "grpo") -> dict[UUID, float]:
        """Return the advantage of each rollout, by its id; all its segments get the same.

        Args:
            kind: `grpo`, `dr_grpo`, `rloo` or `reinforce_pp_baseline`; see `advantages_of`.

        Raises:
            InputError: A rollout has no reward, or there is no such kind.
        """
        if unscored := [each.rollout_id for each in self.rollouts() if each.reward is None]:
            raise InputError(
                f"{len(unscored)} rollouts of step {self.step} have no reward.",
                why=f"The first is {unscored[0]}.",
                remedy=f"Score them: rollout rescore {self.run} --reward NAME.",
            )
        rewards = [[each.reward or 0.0 for each in group.rollouts] for group in self.groups]
        values = advantages_of(rewards, kind)
        return {
            rollout.rollout_id: value
            for group, row in zip(self.groups, values, strict=True)
            for rollout, value in zip(group.rollouts, row, strict=True)
        }

    @cached_property
    def _rows(self) -> list[TokenRow]:
        rows: list[TokenRow] = []
        for group in self.groups:
            for rollout in group.rollouts:
                rows += rows_of(
                    self._segments(rollout),
                    reward=rollout.reward,
                    group_id=group.group_id,
                    rollout_id=rollout.rollout_id,
                )
        return rows

    def _segments(self, rollout: TrainRollout) -> tuple[Segment, ...]:
        merged = merge_calls(rollout.calls, truncated=self.spec.truncated)
        try:
            segments = choose_segments(merged.segments, self.spec.segments)
        except ValueError as error:
            raise self._refused(
                rollout,
                str(error),
                "Allow several (BatchSpec.segments), or let the agent only append to its messages.",
            ) from error
        if self.spec.needs_logprobs and (why := _lack(rollout, merged, segments)):
            raise self._refused(
                rollout,
                why,
                "Start the run with tokens=required, on a server that returns ids and logprobs "
                "(llm.server).",
            )
        return segments

    def _refused(self, rollout: TrainRollout, why: str, remedy: str) -> NotAllowed:
        return NotAllowed(
            f"Rollout {rollout.rollout_id} of step {self.step} cannot be trained as asked.",
            why=why[0].upper() + why[1:] + ".",
            remedy=remedy,
            code=E_TOKENS,
        )


def _lack(rollout: TrainRollout, merged: Segments, segments: tuple[Segment, ...]) -> str:
    if not rollout.calls:
        return "the server recorded no token ids"
    if merged.missing:
        return f"the server recorded no token ids for {merged.missing} of its calls"
    if not all(segment.has_logprobs for segment in segments):
        return "the server recorded no logprobs for some of its tokens"
    return ""
