"""Rows as tensors and as a data set, every row once; run by `make test-trl`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import pytest
from fixtures.stored_run import StoredRun
from fixtures.token_runs import ONE, TWO, token_run
from sqlalchemy import Engine

from pipeline.contract.errors import NotAllowed
from pipeline.contract.train_batch import BatchSpec
from pipeline.trainer.adapters.segment_table import SEGMENT_COLUMNS, segment_dataset
from pipeline.trainer.client import TrainerClient

torch = pytest.importorskip("torch", reason="torch is not installed: make test-trl installs it")

from torch.utils.data import DataLoader  # noqa: E402

from pipeline.trainer.adapters.torch_dataset import (  # noqa: E402
    PaddedRows,
    RolloutIterableDataset,
)

SPEC = BatchSpec(groups=1)


@pytest.fixture
def client(engine: Engine) -> TrainerClient:
    """Two groups of two rollouts: one of one segment, one of two."""
    run = token_run(StoredRun(engine, prompts=2, n=2), ONE, TWO).run
    return TrainerClient(engine, run=run.slug)


def test_a_row_is_tensors_of_the_recorded_tokens(client):
    row = next(iter(RolloutIterableDataset(client, SPEC)))
    assert row["token_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert row["loss_mask"].tolist() == [0, 0, 1, 1, 0, 1]
    assert row["logprobs"].tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert row["versions"].tolist() == [-1, -1, 5, 5, -1, 5]
    assert (row["token_ids"].dtype, row["logprobs"].dtype) == (torch.int64, torch.float32)
    assert (row["reward"], row["step"], row["prompt_length"]) == (0.0, 0, 2)


def test_an_iteration_is_a_step_until_the_run_is_drained(client):
    data = RolloutIterableDataset(client, SPEC)
    steps = []
    while not data.drained:
        steps.append([row["step"] for row in data])
        client.commit(data.last_step)
    assert steps == [[0, 0, 0], [1, 1, 1], []]
    assert client.stats().groups["consumed"] == 2


def test_an_iteration_that_is_left_early_gives_its_step_again(client):
    data = RolloutIterableDataset(client, SPEC)
    first = next(iter(data))
    assert data.last_step is None
    assert next(iter(data))["rollout_id"] == first["rollout_id"]


def test_ranks_share_a_step_without_a_row_twice(client, engine):
    def rows(rank: int) -> list[tuple[str, int]]:
        own = RolloutIterableDataset(client, SPEC, start_step=0, rank=rank, world_size=2)
        return [(row["rollout_id"], row["segment_index"]) for row in own]

    both = rows(0) + rows(1)
    assert len(both) == len(set(both)) == 3


def test_a_loader_pads_rows_and_keeps_the_advantage_of_each_rollout(client):
    loader = DataLoader(RolloutIterableDataset(client, SPEC), 3, collate_fn=PaddedRows(pad_id=9))
    (batch,) = loader
    assert batch["token_ids"].tolist() == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 9, 9],
        [1, 2, 9, 6, 9, 9],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [6, 4, 4]
    assert batch["loss_mask"].sum(1).tolist() == [3, 2, 1]
    low, high, again = batch["advantages"].tolist()
    assert (round(low, 2), round(high, 2), high) == (-0.71, 0.71, again)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_worker_processes_of_a_loader_are_refused(client):
    loader = DataLoader(RolloutIterableDataset(client, SPEC), num_workers=1, collate_fn=list)
    with pytest.raises(NotAllowed, match="num_workers=0"):
        list(loader)


def test_a_hugging_face_data_set_has_a_row_for_each_segment(client):
    pytest.importorskip("datasets")
    found = segment_dataset([client.pull(0, SPEC), client.pull(1, SPEC)], run="a")
    assert len(found) == 6
    assert found["token_ids"][:3] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 9, 6]]
    assert found["reward"][:3] == [0.0, 1.0, 1.0]
    assert found["step"][2:4] == [0, 1]
    assert found.with_format("torch")[0]["logprobs"].tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert segment_dataset([], run="a").column_names == list(SEGMENT_COLUMNS)
