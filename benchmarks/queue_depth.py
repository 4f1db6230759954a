"""The time to publish requests while a hundred thousand of them wait on the broker.

`goals.py` calls it with the store's benchmarks; the broker is a private Redis. Must not: use a
shortcut that the dispatcher does not use.
"""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median
from time import perf_counter

from benchmarks.private_servers import private_broker
from pipeline.contract.rollout import RunState, group_id_of, prompt_id_of, rollout_id_of, run_id_of
from pipeline.contract.run import RunConfig
from pipeline.requests import request_of
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.store.runs import Run

QUEUE = "deep"
_BATCH = 256
#: Number of measured batches at the beginning and at the end of the filling.
_ENDS = 20


def measure_publish(*, depth: int) -> tuple[float, float]:
    """Return ms to publish 256 requests to an empty queue, and to one with `depth` messages."""
    with private_broker() as (publisher, client):
        requests = [request_of(_RUN, _attempt(number)) for number in range(_BATCH)]
        took_ms: list[float] = []
        while len(took_ms) * _BATCH < depth + _ENDS * _BATCH:
            started = perf_counter()
            publisher.publish(requests, queue=QUEUE)
            took_ms.append((perf_counter() - started) * 1000)
        waiting = client.llen(QUEUE)
    if waiting != len(took_ms) * _BATCH:
        raise RuntimeError(f"{waiting} of {len(took_ms) * _BATCH} requests wait in the queue")
    return median(took_ms[1 : _ENDS + 1]), median(took_ms[-_ENDS:])


def _attempt(number: int) -> ClaimedAttempt:
    prompt_id = prompt_id_of(_RUN.run_id, "bench", "train", 0, number)
    return ClaimedAttempt(
        rollout_id=rollout_id_of(prompt_id, 0),
        group_id=group_id_of(prompt_id),
        group_no=number,
        rollout_index=0,
        attempt_no=1,
        n=1,
        payload={"content": f"question {number} {'x' * 200}", "answer": str(number)},
    )


_RUN = Run(
    run_id=run_id_of(QUEUE),
    slug=QUEUE,
    state=RunState.ACTIVE,
    state_reason=None,
    config=RunConfig(),
    policy_version=0,
    created_at=datetime.now(UTC),
    sealed_at=None,
)
