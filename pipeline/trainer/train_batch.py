"""The batch that a trainer gets: groups with their rollouts, and their tokens as rows.

`batches.py` and `stored_groups.py` make it. A rollout with tokens is read without its body; the
body is fetched when the trajectory is first read. Must not: lease or change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from uuid import UUID

from pipeline.contract.advantages import AdvantageKind, advantages_of
from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.tokens.padding import Array, padded_columns
from pipeline.tokens.rows import Balance, TokenRow, rows_of, shard_rows
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
            UnreadableBody: The bytes are gone or damaged.
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
    """The groups that one `(run, consumer, step)` leased; a second pull gives the same batch.

    A shard has all groups, and the rows of one rank.
    """

    run: str
    consumer: str
    step: int
    groups: tuple[TrainGroup, ...]
    replayed: bool
    spec: BatchSpec = field(default_factory=BatchSpec)
    _shard: tuple[TokenRow, ...] | None = field(default=None, repr=False, compare=False)

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
        return self._rows if self._shard is None else list(self._shard)

    @property
    def rows_missing(self) -> int:
        """Rollouts that give no row, of the whole batch."""
        found = {row.rollout_id for row in self._rows}
        return sum(rollout.rollout_id not in found for rollout in self.rollouts())

    def shard(self, rank: int, world_size: int, balance: Balance = "tokens") -> TrainBatch:
        """Return this batch with the rows of one rank; each row belongs to exactly one rank.

        All ranks pull the same step and get the same rows, so they agree without a message.
        `groups` and `advantages` stay those of the whole batch. With more ranks than rows some
        shards have no row.

        Args:
            rank: From 0 to `world_size - 1`.
            world_size: Number of shards.
            balance: `tokens` spreads single rows: the shards' tokens differ by the longest row at
                most, and their numbers of rows by one. `groups` keeps the rows of a group together,
                and spreads groups in the same way.

        Raises:
            InputError: There is no such rank, or no such balance.
            NotAllowed: As `rows`.
        """
        return replace(self, _shard=tuple(shard_rows(self.rows(), rank, world_size, balance)))

    def to_padded(
        self,
        prompt_length: int | None = None,
        response_length: int | None = None,
        pad_id: int = 0,
    ) -> dict[str, Array]:
        """Return the rows as padded arrays, one line for each of `rows()`, in verl's layout.

        Args:
            prompt_length: P, with None that of the longest prompt; longer prompts are cut at their
                beginning. A prompt is all tokens before the first sampled one.
            response_length: R, likewise; longer responses are cut at their end.
            pad_id: The padding token.

        Returns:
            int64 `prompts` [B,P] padded at the left, `responses` [B,R] padded at the right,
            `response_mask` [B,R] (1 on sampled tokens), `input_ids`, `attention_mask`,
            `position_ids` [B,P+R]; float32 `rm_scores` [B,R], the rollout's reward at the last
            response token, NaN without a reward, and no such array if no row has one; float32
            `rollout_log_probs` [B,R], if all sampled tokens have a logprob.

        Raises:
            NotAllowed: As `rows`.
        """
        rows = self.rows()
        return padded_columns(
            rows,
            [row.reward for row in rows],
            pad_id=pad_id,
            prompt_length=prompt_length,
            response_length=response_length,
        )

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
