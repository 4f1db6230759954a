"""Ids: deterministic, standard, distinct where the things are, and near where the rows are near."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.rollout import (
    BLOCK_ROWS,
    group_id_of,
    label_of,
    prompt_id_of,
    rollout_id_of,
    run_id_of,
)

NAMESPACE = uuid.UUID("6f0e4a52-6d0b-5b0e-9a53-5c7f1c1d7a10")

run_ids = st.uuids()
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(slug=words)
def test_a_run_id_is_the_uuid5_of_its_slug(slug):
    assert run_id_of(slug) == uuid.uuid5(NAMESPACE, slug)


@given(run_id=run_ids, dataset=words, split=words, epoch=st.integers(), row_no=st.integers(0))
def test_ids_of_a_row_are_hashes_behind_the_beginning_of_its_block(
    run_id, dataset, split, epoch, row_no
):
    prompt_id = prompt_id_of(run_id, dataset, split, epoch, row_no)
    assert prompt_id == prompt_id_of(run_id, dataset, split, epoch, row_no)
    neighbour = prompt_id_of(run_id, dataset, split, epoch, row_no ^ 1)
    others = [neighbour, group_id_of(prompt_id), rollout_id_of(prompt_id, 0)]
    assert {other.bytes[:2] for other in others} == {prompt_id.bytes[:2]}
    assert len({prompt_id, *others}) == 4
    for made in (prompt_id, *others):
        assert made.version == 8
        assert made.variant == uuid.RFC_4122


def test_blocks_lie_apart():
    run_id = run_id_of("math7")
    rows = range(0, 100 * BLOCK_ROWS, BLOCK_ROWS)
    assert len({prompt_id_of(run_id, "gsm8k", "train", 0, row).bytes[:2] for row in rows}) > 90


@given(prompt_id=run_ids)
def test_group_and_rollouts_of_a_prompt_have_different_ids(prompt_id):
    ids = {group_id_of(prompt_id), *(rollout_id_of(prompt_id, index) for index in range(64))}
    assert len(ids) == 65


def test_ids_stay_what_they_are():
    prompt_id = prompt_id_of(run_id_of("math7"), "gsm8k", "train", 0, 13)
    assert str(run_id_of("math7")) == "7c125201-8365-5b3c-ac33-d614038e43e4"
    assert str(prompt_id) == "7bb92056-d382-83bb-a70a-b829e2f1fc6e"
    assert str(group_id_of(prompt_id)) == "7bb90536-6a0e-81c5-8dcf-a0ab7ebafb8b"
    assert str(rollout_id_of(prompt_id, 3)) == "7bb9a2ed-ed5e-8fe4-a7cb-c213866d21b9"


def test_a_label_reads_like_the_attempt():
    assert label_of("math7", 13, 3, 1) == "math7-g000013-r3-a1"
