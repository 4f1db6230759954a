"""Prompts into the store: each row once, whatever is repeated or interrupted."""

from __future__ import annotations

import threading
from itertools import islice

import pytest
from fixtures.stored_run import SOURCE, StoredRun, payload

from pipeline.contract.errors import InputError, NotAllowed, NotFound
from pipeline.contract.run import RunConfig
from pipeline.store.engine import WORK_CHANNEL, Listener, transact
from pipeline.store.prompts import PromptSource, add_prompts, count_prompts
from pipeline.store.runs import create_run, find_run, get_run, list_runs
from producers.datasets import Prompt
from producers.enqueue import enqueue


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row_no=row_no, payload=payload(row_no)) for row_no in range(count)]


def test_every_prompt_gets_a_group_of_n_queued_rollouts(engine):
    story = StoredRun(engine, prompts=3, n=4)
    assert [row["group_no"] for row in story.groups()] == [0, 1, 2]
    assert story.states() == {"queued": 12}
    assert [row["rollout_index"] for row in story.rollouts()] == [0, 1, 2, 3] * 3


def test_enqueueing_the_same_dataset_twice_adds_nothing_and_says_so(engine):
    config = RunConfig(n=2)
    arguments = {"run": "twice", "config": config, "source": SOURCE}
    first = enqueue(engine, prompts=prompts(5), **arguments)
    second = enqueue(engine, prompts=prompts(5), **arguments)
    assert (first.prompts, first.rollouts, first.added) == (5, 10, 5)
    assert (second.prompts, second.rollouts, second.added) == (5, 10, 0)


def test_enqueueing_after_a_crash_in_the_middle_adds_what_is_missing(engine, monkeypatch):
    monkeypatch.setattr("producers.enqueue.CHUNK", 2)
    config = RunConfig(n=2)

    def interrupted():
        yield from islice(prompts(5), 3)
        raise KeyboardInterrupt

    arguments = {"run": "crashed", "config": config, "source": SOURCE}
    with pytest.raises(KeyboardInterrupt):
        enqueue(engine, prompts=interrupted(), **arguments)
    report = enqueue(engine, prompts=prompts(5), **arguments)
    assert (report.prompts, report.added) == (5, 3)


def test_more_rows_of_the_same_dataset_are_added_behind(engine):
    story = StoredRun(engine, prompts=2)
    assert story.add(range(4)) == 2
    assert [row["group_no"] for row in story.groups()] == [0, 1, 2, 3]


def test_a_row_number_that_occurs_twice_is_named_and_nothing_is_added(engine):
    story = StoredRun(engine, prompts=0)
    with pytest.raises(InputError, match="Row 1 of dataset numbers occurs twice"):
        story.add([0, 1, 1])
    assert not story.groups()


def test_a_row_that_has_changed_is_refused_and_nothing_of_its_chunk_is_added(engine):
    story = StoredRun(engine, prompts=2)
    changed = [(1, {"prompt": "another"}), (7, payload(7))]
    with pytest.raises(NotAllowed, match=rf"Row 1 of dataset numbers.*{story.run.slug}"):
        transact(engine, lambda c: add_prompts(c, story.run, SOURCE, changed))
    assert len(story.groups()) == 2


def test_the_order_of_a_rows_fields_does_not_make_it_another(engine):
    story = StoredRun(engine, prompts=1)
    turned = [(0, dict(reversed(payload(0).items())))]
    assert transact(engine, lambda c: add_prompts(c, story.run, SOURCE, turned)) == 0


@pytest.mark.parametrize(
    "source",
    [PromptSource("other"), PromptSource("numbers", "test"), PromptSource("numbers", epoch=1)],
)
def test_another_dataset_split_or_epoch_has_prompts_of_its_own(engine, source):
    story = StoredRun(engine, prompts=1)
    assert transact(engine, lambda c: add_prompts(c, story.run, source, [(0, payload(0))])) == 1


def test_two_producers_of_one_run_add_every_row_once(engine):
    story = StoredRun(engine, prompts=0)
    rows = [range(start, start + 40) for start in (0, 20, 0, 20)]
    added: list[int] = []
    threads = [threading.Thread(target=lambda r=r: added.append(story.add(r))) for r in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added) == 60
    assert [row["group_no"] for row in story.groups()] == list(range(60))
    assert transact(engine, lambda c: count_prompts(c, story.run)) == 60


def test_odd_texts_come_back_as_they_went_in(engine):
    story = StoredRun(engine, prompts=0)
    odd = {"prompt": 'tab\there \\n "quoted" {braces} 数 🙂\nline', "answer": ["\\N", None, 1.5]}
    transact(engine, lambda c: add_prompts(c, story.run, SOURCE, [(0, odd)]))
    assert story.claim_one().payload == odd


def test_new_work_wakes_whoever_listens(engine):
    listener = Listener(engine, WORK_CHANNEL)
    assert listener.wait(0)  # begins to listen
    assert not listener.wait(0)
    StoredRun(engine)
    assert listener.wait(20)
    assert not listener.wait(0)
    listener.close()


def test_options_of_an_agent_in_any_order_are_the_same_run(engine):
    config = RunConfig(agent_config={"sandbox": "k8s", "image": "a", "limits": {"wall_s": 1e2}})
    first = transact(engine, lambda c: create_run(c, "swe", config))
    assert transact(engine, lambda c: create_run(c, "swe", config)) == first


def test_a_run_is_made_once_and_asks_for_one_thing(engine):
    first = transact(engine, lambda c: create_run(c, "math7", RunConfig(n=4)))
    again = transact(engine, lambda c: create_run(c, "math7", RunConfig(n=4)))
    assert again == first
    with pytest.raises(NotAllowed, match=r"math7 exists.*n \(4 → 8\)"):
        transact(engine, lambda c: create_run(c, "math7", RunConfig(n=8)))


def test_a_slug_that_cannot_name_a_run_is_refused(engine):
    with pytest.raises(InputError, match="cannot name a run") as refused:
        enqueue(engine, run="No Way", config=RunConfig(), source=SOURCE, prompts=[])
    assert refused.value.code == "E122"


def test_operators_may_shorten_a_runs_name_and_nobody_else(engine):
    for slug in ("math", "math7", "chess"):
        transact(engine, lambda c, slug=slug: create_run(c, slug, RunConfig()))

    def found(name: str) -> str:
        return transact(engine, lambda c: find_run(c, name)).slug

    assert found("math") == "math"
    assert found("ch") == "chess"
    assert found("@last") == "chess"
    with pytest.raises(NotFound, match="several runs"):
        found("mat")
    with pytest.raises(NotFound, match="no run 'go'"):
        found("go")
    assert transact(engine, lambda c: get_run(c, "math")).slug == "math"
    for name in ("ch", "@last"):
        with pytest.raises(NotFound, match="no run"):
            transact(engine, lambda c, name=name: get_run(c, name))
    assert [run.slug for run in transact(engine, list_runs)] == ["chess", "math7", "math"]
