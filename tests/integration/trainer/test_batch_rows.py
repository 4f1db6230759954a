"""The rows that a trainer pulls: of tokens alone, and from wherever they are stored."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.stored_run import StoredRun
from fixtures.token_runs import ONE, TWO, WITHOUT_LOGPROBS, Said, succeeded
from sqlalchemy import Engine, text

from pipeline.contract.errors import NotAllowed, UnreadableBody
from pipeline.contract.train_batch import BatchSpec
from pipeline.queue.claim_checks import check_out
from pipeline.queue.payloads import FolderPayloads
from pipeline.store.engine import transact
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch


def batch_of(engine: Engine, *said: Sequence[Said], **spec: Any) -> TrainBatch:
    story = StoredRun(engine, n=len(said), n_min=1)
    attempts = story.claim()
    story.record(*(succeeded(story, a, each) for a, each in zip(attempts, said, strict=True)))
    client = TrainerClient(engine, run=story.run.slug)
    batch = client.pull(0, BatchSpec(groups=1, min_group_size=1, **spec))
    client.close()
    return batch


def test_a_row_holds_the_tokens_of_a_rollout_with_its_reward_and_names(engine):
    batch = batch_of(engine, ONE, ONE)
    (group,) = batch.groups
    first, second = batch.rows()
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert first.logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert first.versions.tolist() == [-1, -1, 5, 5, -1, 5]
    dtypes = (first.token_ids, first.loss_mask, first.logprobs, first.versions)
    assert [str(array.dtype) for array in dtypes] == ["int32", "uint8", "float32", "int32"]
    assert (first.reward, second.reward) == (0.0, 1.0)
    assert first.group_id == second.group_id == group.group_id
    assert [row.rollout_id for row in batch.rows()] == [r.rollout_id for r in batch.rollouts()]
    assert (first.segment_index, batch.rows_missing) == (0, 0)


def test_a_rollout_whose_context_was_rewritten_gives_several_rows_with_one_reward(engine):
    rows = batch_of(engine, TWO).rows()
    assert [row.segment_index for row in rows] == [0, 1]
    assert [row.origin for row in rows] == ["start", "rewrite"]
    assert len({row.rollout_id for row in rows}) == 1
    (last,) = batch_of(engine, TWO, segments="last").rows()
    assert last.calls == (1,)
    (longest,) = batch_of(engine, TWO, segments="longest").rows()
    assert longest.calls == (0,)


def test_several_segments_can_be_made_an_error(engine):
    with pytest.raises(NotAllowed, match=r"form 2 segments: start \(4\), rewrite \(4\)") as refused:
        batch_of(engine, TWO, segments="error").rows()
    assert refused.value.code == "E135"
    assert len(batch_of(engine, ONE, segments="error").rows()) == 1


def test_rollouts_without_ids_give_no_row_and_are_counted(engine):
    batch = batch_of(engine, ONE, [], [])
    assert len(batch.rows()) == 1
    assert batch.rows_missing == 2
    assert len(list(batch.rollouts())) == 3


@pytest.mark.parametrize(("said", "why"), [([], "no token ids"), (WITHOUT_LOGPROBS, "no logprobs")])
def test_a_trainer_that_needs_logprobs_is_told_which_rollout_has_none(engine, said, why):
    batch = batch_of(engine, ONE, said, needs_logprobs=True)
    with pytest.raises(NotAllowed, match=rf"{why}.*tokens=required"):
        batch.rows()
    assert len(batch_of(engine, ONE, ONE, needs_logprobs=True).rows()) == 2


def test_logprobs_that_the_server_did_not_give_are_not_numbers(engine):
    (row,) = batch_of(engine, WITHOUT_LOGPROBS).rows()
    assert np.isnan(row.logprobs).tolist() == [False, False, True]
    assert not row.has_logprobs


def test_an_unknown_choice_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="segments must be one of all, last, longest, error"):
        BatchSpec(segments="first")  # type: ignore[arg-type]


def test_tokens_and_messages_are_read_from_the_payload_store(engine, tmp_path):
    story, payloads = StoredRun(engine, n=1, n_min=1), FolderPayloads(tmp_path)
    story.record(check_out(succeeded(story, story.claim_one(), ONE), payloads))
    client = TrainerClient(engine, run=story.run.slug, payloads=payloads)
    batch = client.pull(0, BatchSpec(groups=1, min_group_size=1))
    assert batch.rows()[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    (rollout,) = batch.rollouts()
    assert rollout.messages[0]["content"] == "7"


def test_a_rollout_with_tokens_is_read_without_its_body(engine, tmp_path):
    """A trainer of tokens does not fetch the text, so its loss stops no such trainer."""
    story, payloads = StoredRun(engine, n=1, n_min=1), FolderPayloads(tmp_path)
    story.record(check_out(succeeded(story, story.claim_one(), ONE), payloads))
    (body,) = tmp_path.rglob("*.frame")
    body.unlink()
    client = TrainerClient(engine, run=story.run.slug, payloads=payloads)
    batch = client.pull(0, BatchSpec(groups=1, min_group_size=1))
    assert len(batch.rows()) == 1
    (rollout,) = batch.rollouts()
    with pytest.raises(UnreadableBody, match="is gone"):
        _ = rollout.messages


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"other")])
def test_a_group_whose_tokens_cannot_be_read_is_dropped_and_another_takes_its_place(
    engine, tmp_path, damage
):
    story, payloads = StoredRun(engine, prompts=2, n=1, n_min=1), FolderPayloads(tmp_path)
    for attempt in story.claim():
        story.record(check_out(succeeded(story, attempt, ONE), payloads))
        if attempt.group_no == 0:
            (tokens,) = tmp_path.rglob("*.tokens")
            damage(tokens)
            spared = tokens
    client = TrainerClient(engine, run=story.run.slug, payloads=payloads)
    batch = client.pull(0, BatchSpec(groups=1, min_group_size=1))
    assert [group.group_no for group in batch.groups] == [1]
    assert [group["drop_reason"] for group in story.groups()] == ["unreadable", None]
    assert spared.name.endswith(".tokens")


def test_the_tokens_of_another_execution_are_never_trained_with_a_reward(engine):
    story = StoredRun(engine, n=1, n_min=1)
    story.record(succeeded(story, story.claim_one(), ONE))
    swap = text("UPDATE trajectories SET tokens = :tokens")
    transact(engine, lambda c: c.execute(swap, {"tokens": b"other"}))
    client = TrainerClient(engine, run=story.run.slug)
    with pytest.raises(Exception, match=r"no further groups"):
        client.pull(0, BatchSpec(groups=1, min_group_size=1))
    assert story.groups()[0]["drop_reason"] == "unreadable"


def test_a_pickled_batch_has_its_messages_and_rows(engine):
    batch = pickle.loads(pickle.dumps(batch_of(engine, ONE)))
    (rollout,) = batch.rollouts()
    assert rollout.messages[0]["content"] == "7"
    assert batch.rows()[0].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
