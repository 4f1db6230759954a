"""`rollout samples` and the groups of `rollout show run`: a few of many, as a condition says."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, servers_of
from fixtures.stored_run import StoredRun, answered
from sqlalchemy import Engine, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import StopReason
from pipeline.contract.trajectory import pack_record
from pipeline.store import samples
from pipeline.store.engine import transact
from pipeline.store.rollout_filter import RolloutFilter, parse_filter


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    """Two groups of two: rewards 1 and 0; reward 0.5 cut short, and a failure."""
    story = StoredRun(engine, prompts=2, n=2, slug="math", n_min=1)
    a, b, c, d = story.claim()
    story.record(
        story.succeeded(a),
        story.succeeded(b, 0.0, n_turns=3),
        story.succeeded(c, 0.5, stop_reason=StopReason.MAX_STEPS),
        story.failed(d, ErrorClass.CONTRACT),
    )
    return story


@pytest.fixture
def rollout(tmp_path: Path, database_url: str, redis_place: BrokerPlace) -> CommandLine:
    return CommandLine(tmp_path, **servers_of(database_url, redis_place))


@pytest.mark.parametrize(
    ("condition", "labels"),
    [
        ("reward == 0", ["g000000-r1"]),
        ("reward > 0", ["g000000-r0", "g000001-r0"]),
        ("reward is None", ["g000001-r1"]),
        ("reward != 0", ["g000000-r0", "g000001-r0", "g000001-r1"]),
        ("not reward == 0", ["g000000-r0", "g000001-r0", "g000001-r1"]),
        ("status == 'failed' and error_class == 'contract'", ["g000001-r1"]),
        ("error_code == 'test'", ["g000001-r1"]),
        ("stop_reason == 'max_steps'", ["g000001-r0"]),
        ("turns >= 3 or 'went wrong' in message", ["g000000-r1", "g000001-r1"]),
        ("tokens == 14 and group == 0 and index == 0", ["g000000-r0"]),
        ("label == 'math-g000001-r1'", ["g000001-r1"]),
        ("'g000001' in label", ["g000001-r0", "g000001-r1"]),
    ],
)
def test_a_condition_chooses_rollouts(story: StoredRun, condition: str, labels: list[str]):
    where = parse_filter(condition)
    rows = transact(story.engine, lambda c: samples.read_samples(c, story.run, where, limit=10))
    assert [f"g{row.group_no:06d}-r{row.rollout_index}" for row in rows] == labels


def test_samples_are_few_and_of_one_run(story: StoredRun):
    other = StoredRun(story.engine, prompts=1, slug="math2")
    everything = RolloutFilter()

    def read(run, limit: int) -> int:
        found = transact(
            story.engine, lambda c: samples.read_samples(c, run, everything, limit=limit)
        )
        return len(found)

    assert (read(story.run, 3), read(story.run, 10), read(other.run, 10)) == (3, 4, 1)


def test_question_answer_reward_and_error_are_printed(story: StoredRun, rollout: CommandLine):
    shown = rollout("samples", "math", "--where", "reward == 0").out.splitlines()
    assert shown[0] == "── math-g000000-r1: succeeded, reward 0.000, 3 turns, 14 tokens"
    fields = {line[:11].strip(): line[11:] for line in shown[1:]}
    assert fields["answer"] == "7"
    assert fields["stopped"] == "answered"
    assert fields["question"] == "What is 0 + 1?"
    assert fields["expected"] == "1"
    failed = rollout("samples", "math", "--where", "status == 'failed'").out
    assert "reward –" in failed
    assert "(no trajectory is stored)" in failed
    assert "contract (test): It went wrong." in failed
    assert rollout("samples", "--where", "turns > 99").out == "Run math has no such rollout.\n"


def test_samples_are_data_too(story: StoredRun, rollout: CommandLine):
    told = rollout.json("samples", "math", "--limit", "2")
    assert (told["run"], told["where"], len(told["samples"])) == ("math", None, 2)
    first = told["samples"][0]
    assert (first["final_answer"], first["reward"], first["error"]) == ("7", 1.0, None)
    assert first["prompt"]["answer"]
    (failed,) = rollout.json("samples", "math", "--where", "status == 'failed'")["samples"]
    assert failed["final_answer"] is None
    assert failed["error"] == {"class": "contract", "code": "test", "message": "It went wrong."}


def test_an_unknown_field_is_refused_with_the_nearest_one(story: StoredRun, rollout: CommandLine):
    done = rollout.call("samples", "math", "--where", "rewrad == 0", "--json")
    assert done.code == 2
    assert done.document["error"] == {
        "code": "E108",
        "message": "--where knows no field 'rewrad'.",
        "remedy": "Did you mean 'reward'?",
    }


def test_what_a_model_said_cannot_drive_the_terminal(engine: Engine, rollout: CommandLine):
    story = StoredRun(engine, slug="wild", n_min=1)
    body = pack_record(answered("\x1b]0;owned\x07" + "x" * 5000))
    story.record(story.succeeded(story.claim_one(), body=body, body_bytes=len(body)))
    shown = rollout("samples", "wild").out
    assert "\x1b" not in shown
    assert r"\x1b]0;owned" in shown
    assert len(shown) < 2000


def test_samples_are_found_along_indexes(engine: Engine):
    story = StoredRun(engine, prompts=3000, n=2, slug="large")
    query = text("EXPLAIN " + samples._SAMPLES.format(condition="true"))
    with engine.connect() as connection:
        connection.execute(text("ANALYZE"))
        values = {"run_id": story.run.run_id, "limit": 5}
        plan = "\n".join(connection.execute(query, values).scalars())
    assert "groups_run_id_group_no_key" in plan
    assert "Seq Scan on rollouts" not in plan


def test_a_run_is_shown_with_its_first_groups(story: StoredRun, rollout: CommandLine):
    groups = rollout.json("show", "run", "math")["first_groups"]
    assert [each["label"] for each in groups] == ["math-g000000", "math-g000001"]
    assert [each["state"] for each in groups] == ["ready", "ready"]
    assert [each["reward_mean"] for each in groups] == [0.5, 0.5]
    assert (groups[1]["succeeded"], groups[1]["failed"]) == (1, 1)
    shown = rollout("show", "run", "math", "--limit", "1").out
    assert "math-g000000" in shown
    assert "math-g000001" not in shown
    assert "1 more groups: --limit 2" in shown
    assert rollout.json("show", "run", "math", "--limit", "0")["first_groups"] == []
