"""The time to publish requests while a hundred thousand of them wait on the broker.

`goals.py` calls it with the store's benchmarks; the broker is a private Redis. Must not: use a
shortcut that the dispatcher does not use.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import redis

from pipeline.contract.rollout import RunState, group_id_of, prompt_id_of, rollout_id_of, run_id_of
from pipeline.contract.run import RunConfig
from pipeline.embedded import EmbeddedServices
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher
from pipeline.requests import request_of
from pipeline.settings import load_settings
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.store.runs import Run

QUEUE = "deep"
_BATCH = 256
#: Number of measured batches at the beginning and at the end of the filling.
_ENDS = 20


def measure_publish(*, depth: int) -> tuple[float, float]:
    """Return ms to publish 256 requests to an empty queue, and to one with `depth` messages."""
    with TemporaryDirectory(prefix="rb-") as folder:
        Path(folder).chmod(0o755)
        services = EmbeddedServices(Path(folder) / "data")
        try:
            settings = load_settings(
                overrides={"broker": {"url": services.start_redis()}}, start=Path(folder)
            )
            publisher = RequestPublisher(broker_of(settings), expires_s=3600)
            requests = [request_of(_RUN, _attempt(number)) for number in range(_BATCH)]
            took_ms: list[float] = []
            while len(took_ms) * _BATCH < depth + _ENDS * _BATCH:
                started = perf_counter()
                publisher.publish(requests, queue=QUEUE)
                took_ms.append((perf_counter() - started) * 1000)
            publisher.close()
            client = redis.Redis.from_url(services.redis_client_url)
            waiting = client.llen(QUEUE)
            client.close()
        finally:
            services.remove()
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
