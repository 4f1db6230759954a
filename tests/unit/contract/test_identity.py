"""Ids: deterministic, standard, and distinct where the things are."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.rollout import (
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


@given(run_id=run_ids, dataset=words, split=words, epoch=st.integers(), row_no=st.integers())
def test_a_prompt_id_is_the_uuid5_of_its_row(run_id, dataset, split, epoch, row_no):
    assert prompt_id_of(run_id, dataset, split, epoch, row_no) == uuid.uuid5(
        run_id, f"{dataset}\0{split}\0{epoch}\0{row_no}"
    )


@given(prompt_id=run_ids, index=st.integers(min_value=0, max_value=1023))
def test_a_rollout_id_is_the_uuid5_of_its_index(prompt_id, index):
    assert rollout_id_of(prompt_id, index) == uuid.uuid5(prompt_id, str(index))


@given(prompt_id=run_ids)
def test_ids_are_uuids_of_version_5(prompt_id):
    for made in (group_id_of(prompt_id), rollout_id_of(prompt_id, 0)):
        assert made.version == 5
        assert made.variant == uuid.RFC_4122


@given(prompt_id=run_ids)
def test_group_and_rollouts_of_a_prompt_have_different_ids(prompt_id):
    ids = {group_id_of(prompt_id), *(rollout_id_of(prompt_id, index) for index in range(64))}
    assert len(ids) == 65


def test_the_ids_of_old_stores_stay_what_they_are():
    prompt_id = prompt_id_of(run_id_of("math7"), "gsm8k", "train", 0, 13)
    assert str(run_id_of("math7")) == "7c125201-8365-5b3c-ac33-d614038e43e4"
    assert str(prompt_id) == "665f2056-d382-53bb-a70a-b829e2f1fc6e"
    assert str(group_id_of(prompt_id)) == "17b53f5d-edd8-5877-b18e-5d9915cae895"
    assert str(rollout_id_of(prompt_id, 3)) == "c72fd653-ce15-52f8-b659-ae5c66320bd4"


def test_a_label_reads_like_the_attempt():
    assert label_of("math7", 13, 3, 1) == "math7-g000013-r3-a1"
