"""Rows of a batch are spread over ranks, and padded to arrays."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import chain
from uuid import UUID, uuid4

import numpy as np
import pytest
from fixtures.sampled_calls import sampled
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import InputError
from pipeline.tokens.padding import padded_columns
from pipeline.tokens.rows import Balance, TokenRow, rows_of
from pipeline.tokens.segments import merge_calls
from pipeline.tokens.token_body import SampledCall
from pipeline.trainer.train_batch import TrainBatch, TrainGroup, TrainRollout

GROUPS = [UUID(int=n) for n in range(100)]
PAD = 0


def row(*calls: SampledCall, reward: float | None = 1.0, group: int = 0) -> TokenRow:
    """Return the one row of a rollout."""
    (made,) = rows_of(
        merge_calls(calls).segments, reward=reward, group_id=GROUPS[group], rollout_id=uuid4()
    )
    return made


def batch_of(rows: Sequence[TokenRow]) -> TrainBatch:
    return TrainBatch("run", "trainer", 0, (), replayed=False, _shard=tuple(rows))


def batch_of_lengths(*lengths: int, per_group: int = 1) -> TrainBatch:
    long = [sampled(0, [1], [2] * (length - 1)) for length in lengths]
    return batch_of([row(call, group=n // per_group) for n, call in enumerate(long)])


def tokens(batch: TrainBatch) -> int:
    return sum(len(each.token_ids) for each in batch.rows())


LENGTHS = st.lists(st.integers(2, 300), max_size=40)


@given(LENGTHS, st.integers(1, 9), st.sampled_from(["tokens", "groups"]))
def test_every_row_is_in_exactly_one_shard_in_the_batchs_order(lengths, world_size, balance):
    batch = batch_of_lengths(*lengths, per_group=3)
    place = {id(each): n for n, each in enumerate(batch.rows())}
    shards = [batch.shard(rank, world_size, balance) for rank in range(world_size)]
    places = [[place[id(each)] for each in shard.rows()] for shard in shards]
    assert sorted(chain.from_iterable(places)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in places)


@given(LENGTHS, st.integers(1, 9))
def test_shards_differ_by_the_longest_row_and_by_one_row_at_most(lengths, world_size):
    batch = batch_of_lengths(*lengths)
    shards = [batch.shard(rank, world_size) for rank in range(world_size)]
    sums, counts = [tokens(shard) for shard in shards], [len(shard.rows()) for shard in shards]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    assert max(counts) - min(counts) <= 1


def test_all_ranks_agree_on_the_shards():
    batch = batch_of_lengths(50, 40, 40, 30, 20, 10, 10, 5)
    elsewhere: TrainBatch = pickle.loads(pickle.dumps(batch))
    for rank in range(3):
        here, there = (each.shard(rank, 3).rows() for each in (batch, elsewhere))
        assert [r.rollout_id for r in here] == [r.rollout_id for r in there]
    assert [tokens(batch.shard(rank, 2)) for rank in range(2)] == [105, 100]


@given(LENGTHS, st.integers(1, 9))
def test_a_group_stays_whole_where_groups_are_spread(lengths, world_size):
    batch = batch_of_lengths(*lengths, per_group=4)
    shards = [batch.shard(rank, world_size, "groups") for rank in range(world_size)]
    found = [{each.group_id for each in shard.rows()} for shard in shards]
    assert sum(map(len, found)) == len(set().union(*found))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_shard_has_the_groups_and_advantages_of_the_whole_batch():
    made = [row(sampled(0, [1], [2, 3]), reward=reward) for reward in (0.0, 1.0)]
    rollouts = tuple(
        TrainRollout(each.rollout_id, n, each.reward, None, 1) for n, each in enumerate(made)
    )
    group = TrainGroup(GROUPS[0], 0, 2, {}, rollouts, 0.5, 0.5)
    batch = TrainBatch("run", "trainer", 0, (group,), replayed=False, _shard=tuple(made))
    shard = batch.shard(0, 2)
    assert len(shard.rows()) == 1
    assert shard.groups == batch.groups
    assert shard.advantages("dr_grpo") == batch.advantages("dr_grpo")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank, world_size):
    with pytest.raises(InputError, match=f"no rank {rank} of {world_size}"):
        batch_of_lengths(5, 6).shard(rank, world_size)


def test_an_unknown_balance_is_refused_with_those_that_there_are():
    unknown: Balance = "rows"  # type: ignore[assignment]
    with pytest.raises(InputError, match="tokens, groups"):
        batch_of_lengths(5, 6).shard(0, 2, unknown)


def test_prompts_are_padded_at_their_left_and_responses_at_their_right():
    rows = [
        row(sampled(0, [1, 2], [3]), sampled(1, [1, 2, 3, 4], [5])),
        row(sampled(0, [6], [7], [-0.5])),
    ]
    columns = batch_of(rows).to_padded(pad_id=9)
    assert columns["prompts"].tolist() == [[1, 2], [9, 6]]
    assert columns["responses"].tolist() == [[3, 4, 5], [7, 9, 9]]
    assert columns["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert columns["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert columns["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 1, 1]]
    assert columns["rollout_log_probs"][1].tolist() == [-0.5, 0, 0]
    kinds = {name: str(column.dtype) for name, column in columns.items()}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {
        "rm_scores",
        "rollout_log_probs",
    }
    assert {kind for kind in kinds.values() if kind != "float32"} == {"int64"}


def test_a_shard_without_rows_gives_arrays_without_lines():
    columns = batch_of_lengths(5).shard(1, 2).to_padded(4, 3)
    assert columns["input_ids"].shape == (0, 7)
    assert columns["response_mask"].shape == (0, 3)


def test_the_reward_stands_at_the_last_response_token():
    rewards = [0.5, None]
    rows = [row(sampled(0, [1], [2] * (2 - n)), reward=reward) for n, reward in enumerate(rewards)]
    scores = batch_of(rows).to_padded()["rm_scores"]
    assert scores[0].tolist() == [0, 0.5]
    assert np.isnan(scores[1]).all()
    assert "rm_scores" not in padded_columns(rows, [None, None], pad_id=PAD)


def test_given_widths_cut_a_prompts_beginning_and_a_responses_end():
    calls = [
        sampled(0, [1, 2, 3], [4], [-1.0]),
        sampled(1, [1, 2, 3, 4, 5], [6], [-2.0]),
    ]
    batch = batch_of([row(*calls)])
    columns = batch.to_padded(2, 2, PAD)
    assert columns["input_ids"].tolist() == [[2, 3, 4, 5]]
    assert columns["response_mask"].tolist() == [[1, 0]]
    assert columns["rollout_log_probs"].tolist() == [[-1.0, 0.0]]
    assert columns["rm_scores"].tolist() == [[0.0, 1.0]]
    wide = batch.to_padded(4, 4, PAD)
    assert wide["input_ids"].tolist() == [[PAD, 1, 2, 3, 4, 5, 6, PAD]]


def test_missing_logprobs_give_no_array_of_logprobs():
    known, unknown = sampled(0, [1], [2]), sampled(0, [1], [2], [float("nan")])
    assert "rollout_log_probs" in batch_of([row(known)]).to_padded()
    assert "rollout_log_probs" not in batch_of([row(known), row(unknown)]).to_padded()
