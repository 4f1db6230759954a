"""What workers say of a run under way is added up, however often it is said."""

from __future__ import annotations

from typing import Any

from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.contract.activity import CallFailures, EndpointCalls, RunActivity, ToolCalls
from pipeline.contract.messages import Heartbeat
from pipeline.store.engine import transact
from pipeline.store.leases import keep_alive
from pipeline.store.status import RunStatus, run_status

URL = "http://models.example/v1"


def beat(
    story: StoredRun, worker_id: str, activity: tuple[RunActivity, ...], **fields: Any
) -> None:
    sent = Heartbeat(
        worker_id=worker_id, sequence=1, activity=activity, **({"capacity": 5} | fields)
    )
    transact(story.engine, lambda c: keep_alive(c, [sent], lease_s=60))


def doing(
    story: StoredRun, *, calls: int, failed: int, tools: dict[str, ToolCalls] | None = None
) -> tuple[RunActivity, ...]:
    failure = CallFailures(
        code="connection", count=failed, last_minute=failed, message="connection refused"
    )
    endpoint = EndpointCalls(
        base_url=URL,
        model="m",
        count=calls,
        last_minute=calls,
        failures=(failure,) if failed else (),
    )
    return (RunActivity(run_id=story.run.run_id, endpoints=(endpoint,), tools=tools or {}),)


def status_of(story: StoredRun) -> RunStatus:
    return transact(story.engine, lambda c: run_status(c, story.run))


def test_figures_of_all_workers_are_added_up_and_repeats_change_nothing(engine: Engine):
    story = StoredRun(engine)
    for worker_id in ("w1", "w2", "w1", "w2"):
        beat(story, worker_id, doing(story, calls=10, failed=4, tools={"t": ToolCalls(count=3)}))
    (calls,) = status_of(story).to_json()["model_calls"]
    assert (calls["base_url"], calls["model"], calls["count"]) == (URL, "m", 20)
    assert calls["failures"] == [
        {"code": "connection", "count": 8, "last_minute": 8, "message": "connection refused"}
    ]
    assert status_of(story).to_json()["tools"] == {"t": {"count": 6, "errors": 0}}
    assert (
        f"8 of 20 calls to the model server {URL} in the last minute failed (connection refused); "
        "they are tried again."
    ) in status_of(story).waits


def test_a_server_that_answers_nobody_is_what_the_run_waits_for(engine: Engine):
    story = StoredRun(engine)
    beat(story, "w1", doing(story, calls=512, failed=512))
    assert (
        f"It waits for the model server {URL}: all 512 calls in the last minute failed "
        "(connection refused); they are tried again."
    ) in status_of(story).waits


def test_figures_stay_when_their_worker_has_gone_but_are_no_news(engine: Engine):
    story = StoredRun(engine)
    beat(story, "w1", doing(story, calls=5, failed=5))
    beat(story, "w1", doing(story, calls=6, failed=6), capacity=0, stopping=True)
    beat(story, "w2", doing(story, calls=3, failed=3))
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE processes SET last_seen_at = now() - interval '1 minute'"
                " WHERE process_id = 'w2'"
            )
        )
    found = status_of(story)
    (calls,) = found.activity.endpoints
    assert (calls.count, calls.last_minute) == (9, 0)
    assert not [sentence for sentence in found.waits if URL in sentence]


def test_a_heartbeat_without_figures_leaves_them_as_they_are(engine: Engine):
    story = StoredRun(engine)
    beat(story, "w1", doing(story, calls=5, failed=0))
    beat(story, "w1", ())
    assert status_of(story).activity.endpoints[0].count == 5


def test_one_runs_figures_are_not_anothers(engine: Engine):
    story, other = StoredRun(engine), StoredRun(engine)
    beat(story, "w1", doing(story, calls=5, failed=5))
    assert status_of(other).activity.endpoints == ()


def test_a_tool_that_always_fails_is_told_also_when_the_run_is_finished(engine: Engine):
    story = StoredRun(engine)
    story.record(story.succeeded(story.claim_one()))
    tools = {"search": ToolCalls(count=12, errors=12), "sum": ToolCalls(count=3, errors=2)}
    beat(story, "w1", doing(story, calls=5, failed=0, tools=tools))
    found = status_of(story)
    assert found.waits == ()
    (told,) = found.to_json()["warnings"]
    assert told.startswith("Tool search failed every time it was called (12 of 12 calls)")
    assert f"rollout errors {story.run.slug} --by tool" in told
