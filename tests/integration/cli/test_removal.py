"""`rollout rm`: nothing of the run is left, nothing of its neighbours is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, servers_of
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, inspect, text

from pipeline.contract.errors import ErrorClass, NotAllowed
from pipeline.contract.messages import JournalFrame, RolloutRequest
from pipeline.contract.policy import Policy
from pipeline.contract.rollout import RunState, run_id_of
from pipeline.contract.train_batch import BatchSpec
from pipeline.dispatcher import Dispatcher
from pipeline.store.dead_letters import add_unknown
from pipeline.store.engine import transact
from pipeline.store.journals import add_frames
from pipeline.store.operations import begin_cancel, cancel_rollouts, pause_run
from pipeline.store.removal import begin_removal, remove_groups, remove_rest, require_removable
from pipeline.store.rescore_requests import request_rescores
from pipeline.store.runs import get_run
from pipeline.trainer.client import TrainerClient

#: Tables without rows of a run.
NOT_OF_A_RUN = {"alembic_version", "markers", "processes"}


@pytest.fixture
def rollout(tmp_path: Path, database_url: str, redis_place: BrokerPlace) -> CommandLine:
    return CommandLine(tmp_path, **servers_of(database_url, redis_place))


def populated(engine: Engine, slug: str) -> StoredRun:
    """A finished run with every kind of row: failures, a dead letter, a committed batch."""
    story = StoredRun(engine, prompts=3, n=2, n_min=1, slug=slug)
    first, *others = story.claim()
    frame = {"first": 0, "n_calls": 1, "body": b"calls"}
    kept = JournalFrame(**story.succeeded(first).identity, **frame)
    transact(engine, lambda connection: add_frames(connection, [kept]))
    story.record(
        story.failed(first, ErrorClass.CONTRACT),
        *(story.succeeded(attempt) for attempt in others),
    )
    client = TrainerClient(engine, run=slug)
    client.pull(0, BatchSpec(groups=2, min_group_size=1))
    client.commit(0)
    client.close()
    unknown = story.succeeded(first)
    transact(engine, lambda connection: add_unknown(connection, [(unknown, b"bytes")]))
    with engine.begin() as connection:
        asked = {"error_class": None, "queue": "rollouts", "awaited": False}
        request_rescores(connection, story.run, "judge", **asked)
        connection.execute(
            text("INSERT INTO policy_versions (run_id, version) VALUES (:id, 1)"),
            {"id": story.run.run_id},
        )
        connection.execute(
            text(
                "INSERT INTO remote_sessions (rollout_id, attempt_no, run_id) VALUES (:r, 1, :id)"
            ),
            {"r": first.rollout_id, "id": story.run.run_id},
        )
    return story


def rows_of(engine: Engine) -> dict[str, list[str]]:
    """Return every row of the store as text, by table."""
    tables = set(inspect(engine).get_table_names()) - NOT_OF_A_RUN
    with engine.connect() as connection:
        return {
            table: sorted(connection.execute(text(f"SELECT t::text FROM {table} t")).scalars())
            for table in tables
        }


def remove(story: StoredRun, *, most: int = 500) -> dict[str, int]:
    transact(story.engine, lambda c: begin_removal(c, story.run))
    total: dict[str, int] = {}
    while True:
        part = transact(story.engine, lambda c: remove_groups(c, story.run, most=most))
        total = {name: n + total.get(name, 0) for name, n in part.items()}
        if not part["groups"]:
            break
    rest = transact(story.engine, lambda c: remove_rest(c, story.run))
    return {name: total.get(name, 0) + rest.get(name, 0) for name in total | rest}


def test_nothing_of_the_run_is_left_and_its_neighbours_are_as_before(engine, rollout):
    populated(engine, "ab")
    before = rows_of(engine)
    populated(engine, "a")
    added = {table: len(rows) - len(before[table]) for table, rows in rows_of(engine).items()}
    assert all(n > 0 for n in added.values()), added
    payloads = rollout.folder / ".rollout" / "payloads"
    for slug in ("a", "ab"):
        (payloads / str(run_id_of(slug))).mkdir(parents=True)
        (payloads / str(run_id_of(slug)) / f"{slug}-g000000-r0-a1.frame").write_bytes(b"body")

    told = rollout.json("rm", "a", "--yes")

    assert (told["run"], told["bodies"]) == ("a", 1)
    after = rows_of(engine)
    (note,) = set(after["events"]) - set(before["events"])
    assert "removed" in note
    after["events"].remove(note)
    assert after == before
    assert [path.name for path in payloads.iterdir()] == [str(run_id_of("ab"))]
    # Beside what was counted above: the members of batches and the versions go with their parents.
    counters = [name for name in added if name.endswith("_tallies")]
    expected = {n: added[n] for n in added if n not in (*counters, "events")}
    del expected["train_batch_groups"], expected["policy_versions"]
    assert {name: told["rows"][name] for name in expected} == expected


def test_a_batch_of_groups_at_a_time_comes_to_the_same(engine):
    whole, parts = populated(engine, "whole"), populated(engine, "parts")
    assert remove(parts, most=1) == remove(whole)


def test_an_interrupted_removal_goes_on(engine, rollout):
    story = populated(engine, "cut")
    transact(engine, lambda c: begin_removal(c, story.run))
    transact(engine, lambda c: remove_groups(c, story.run, most=1))
    shown = transact(engine, lambda c: get_run(c, "cut"))
    assert (shown.state, shown.state_reason) == (RunState.CANCELLED, "it is being removed")
    assert rollout.json("rm", "cut", "--yes")["rows"]["groups"] == 2
    assert rollout.json("runs") == {"runs": []}


def test_a_run_in_use_is_refused(engine, rollout):
    story = StoredRun(engine, prompts=2, n=2, n_min=1, slug="busy")
    assert rollout.error("rm", "busy", "--yes") == (7, "E142")
    (first, second, *others) = story.claim()
    transact(engine, lambda c: pause_run(c, story.run))
    with pytest.raises(NotAllowed, match="4 rollouts in flight"):
        transact(engine, lambda c: require_removable(c, story.run))
    story.record(*(story.succeeded(attempt) for attempt in (first, second, *others)))
    client = TrainerClient(engine, run="busy", consumer="t")
    client.pull(0, BatchSpec(groups=1))
    with pytest.raises(NotAllowed, match="Consumer t until"):
        transact(engine, lambda c: require_removable(c, story.run))
    assert rollout.error("rm", "busy", "--yes") == (7, "E142")
    client.commit(0)
    client.close()
    assert rollout.json("rm", "busy", "--dry-run")["rows"] == {}
    assert rollout.error("rm", "busy") == (7, "E131")
    assert rollout.json("rm", "busy", "--yes")["rows"]["runs"] == 1


def test_a_cancelled_run_is_removed_whatever_a_trainer_holds(engine):
    story = StoredRun(engine, prompts=2, n=1, n_min=1, slug="held")
    first, _ = story.claim()
    story.record(story.succeeded(first))
    client = TrainerClient(engine, run="held")
    client.pull(0, BatchSpec(groups=1, min_group_size=1))
    client.close()
    with pytest.raises(NotAllowed, match="active"):
        transact(engine, lambda c: require_removable(c, story.run))
    transact(engine, lambda c: begin_cancel(c, story.run))
    transact(engine, lambda c: cancel_rollouts(c, story.run))
    assert remove(story)["runs"] == 1


def test_only_the_whole_name_removes_a_run(engine, rollout):
    populated(engine, "ab")
    assert rollout.error("rm", "a", "--yes") == (2, "E120")
    assert rollout.json("rm", "@last", "--yes")["run"] == "ab"


def test_a_name_that_was_removed_gets_new_ids_and_late_answers_do_not_count(engine):
    story = StoredRun(engine, prompts=1, n=1, n_min=1, slug="again")
    (old,) = story.claim()
    late = story.succeeded(old)
    transact(engine, lambda c: begin_cancel(c, story.run))
    transact(engine, lambda c: cancel_rollouts(c, story.run))
    remove(story)

    reborn = StoredRun(engine, prompts=1, n=1, n_min=1, slug="again")
    (new,) = reborn.claim()
    assert new.attempt_no == old.attempt_no
    assert new.rollout_id != old.rollout_id
    assert story.record(late).unknown
    assert state_of(reborn, new.rollout_id) == "dispatched"
    reborn.record(reborn.succeeded(new))
    remove(reborn)
    third = StoredRun(engine, prompts=1, slug="again")
    assert len({story.run.run_id, reborn.run.run_id, third.run.run_id}) == 3


def state_of(story: StoredRun, rollout_id: Any) -> str:
    query = "SELECT state FROM rollouts WHERE rollout_id = :id"
    return story.rows(query, id=rollout_id)[0]["state"]


class Published:
    """Takes the broker's place: keeps what the dispatcher publishes."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def publish(self, requests: Sequence[RolloutRequest], *, queue: str) -> list[RolloutRequest]:
        self.labels += [request.label for request in requests]
        return []

    def announce_policies(self, policies: Sequence[Policy]) -> None:
        assert not policies

    def close(self) -> None:
        pass


def test_a_dispatcher_for_named_runs_finds_one_whose_name_was_removed(engine, make_settings):
    story = StoredRun(engine, prompts=1, slug="mine")
    transact(engine, lambda c: begin_cancel(c, story.run))
    transact(engine, lambda c: cancel_rollouts(c, story.run))
    remove(story)
    StoredRun(engine, prompts=1, slug="mine")
    StoredRun(engine, prompts=1, slug="other")
    published = Published()
    settings = make_settings(dispatch={"runs": ("mine",)})
    dispatcher = Dispatcher(engine, published, settings)  # pyright: ignore[reportArgumentType]
    dispatcher.step()
    dispatcher.close()
    assert published.labels == ["mine-g000000-r0-a1"]


def test_after_a_fresh_cancel_workers_are_given_time_to_hear_of_it(engine, rollout):
    story = StoredRun(engine, prompts=1, n=1, slug="fresh")
    story.beat(story.claim_one())
    rollout("cancel", "fresh", "--yes")
    beats = {"ROLLOUT_LEASE__HEARTBEAT_S": "2"}
    assert "until all workers know" in rollout("rm", "fresh", "--yes", environment=beats).err
