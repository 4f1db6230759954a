"""The measurements of the goals G1 to G13, as docs/performance.md describes them.

`python -m benchmarks` calls it. Pairs run alternately against one mock server. A figure that misses
its goal stays in the table. Must not: print.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from time import monotonic, sleep, time
from types import MappingProxyType
from uuid import UUID

from sqlalchemy import text

from benchmarks.growth import StoreTimes, measure_growth
from benchmarks.mock_server import MockServer
from benchmarks.pairs import Comparison, compare
from benchmarks.pipeline_subject import PipelineSubject
from benchmarks.queue_depth import measure_publish
from benchmarks.report import Figure
from benchmarks.store import measure_cycles, measure_enqueue, measure_pgbench
from benchmarks.store_subject import private_store
from benchmarks.subjects import BareLoop
from benchmarks.workloads import WORKLOADS
from pipeline.contract.errors import NotFound
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.settings.sections import LeaseSettings
from pipeline.trainer.client import TrainerClient

MIB = 2**20
#: About the same duration for both, long enough to include writing back the logged changes: in its
#: first two seconds pgbench is 1.5 times as fast as later.
_CYCLES, _CYCLES_S = 6400, 5
#: Goals whose pairs share one deployment of one worker with the default client.
_RATIOS = (
    ("W0", "G1", "W0 CPU per rollout / B1", "cpu", 1.5, 1.25, True),
    ("W0", "G3", "W0 rollouts per s, one worker / B1", "rate", 0.7, 0.9, False),
    ("W1", "G5", "W1 wall / B1", "wall", 1.3, 1.1, True),
    ("W2", "G6", "W2 wall / B1 with 10 retries", "wall", 1.3, 1.1, True),
)


def measure_loops(*, pairs: int) -> tuple[list[Figure], list[Comparison]]:
    """Measure G1, G3, G5, G6 with the default client, G1 with the SDK, and G2."""
    figures: list[Figure] = []
    found: list[Comparison] = []
    with MockServer() as mock:
        with PipelineSubject(client="lean") as subject:
            by_load = {
                load: compare(BareLoop("B1"), subject, WORKLOADS[load], mock, pairs=pairs)
                for load in ("W0", "W1", "W2")
            }
            for load, goal, measure, metric, must, stretch, at_most in _RATIOS:
                ratio = by_load[load].ratio(metric)
                note = _complete(by_load[load])
                figures.append(Figure(goal, measure, ratio, "", must, stretch, at_most, note))
            lean = compare(BareLoop("B2"), subject, WORKLOADS["W0"], mock, pairs=pairs)
            figures.append(
                Figure("G2", "W0 CPU, lean client / B2", lean.ratio("cpu"), "", 3.0, 2.0)
            )
            found += [*by_load.values(), lean]
        with PipelineSubject(client="sdk") as subject:
            sdk = compare(BareLoop("B1"), subject, WORKLOADS["W0"], mock, pairs=pairs)
            figures.append(
                Figure("G1", "the same with llm.client = sdk", sdk.ratio("cpu"), "", 1.5, 1.25)
            )
            found.append(sdk)
    return figures, found


def measure_concurrency() -> list[Figure]:
    """Measure G4 with two workers, and G7 with one that has 500 in flight."""
    load = WORKLOADS["W1s"]
    figures: list[Figure] = []
    with MockServer() as mock:
        with PipelineSubject(workers=2, concurrency=250) as subject:
            runs = [subject.measure(load, mock) for _ in range(3)]
            best = sorted(runs, key=lambda run: run.wall_s)[1]
            peak = median(run.seen["peak_in_flight"] for run in runs)
            value = load.ideal_s / best.wall_s
            note = f"{peak:.0f} in flight seen by the mock"
            figures.append(
                Figure("G4", "W1s efficiency, 2 workers", value, "", 0.75, 0.9, False, note)
            )
        for client, measure in (
            ("lean", "peak memory of a worker"),
            ("sdk", "the same with llm.client = sdk"),
        ):
            with PipelineSubject(concurrency=500, client=client) as subject:
                run = subject.measure(load, mock)
            rss = run.usage["worker-0"].peak_process_rss_bytes / MIB
            note = f"{run.seen['peak_in_flight']} in flight"
            figures.append(Figure("G7", measure, rss, "MiB", 150, 110, True, note))
    return figures


def measure_kill() -> list[Figure]:
    """Measure G8: kill one of two workers at half time, without a restart."""
    load = WORKLOADS["W1s"]
    lease_s = LeaseSettings().lease_s
    with MockServer() as mock, PipelineSubject(workers=2, concurrency=250) as subject:
        killed_at: list[float] = []

        def kill() -> None:
            while subject.finished() < load.rollouts // 2:
                sleep(0.05)
            # Wait until heartbeats have named its attempts: attempts that no worker has named are
            # recovered by other rules, faster than by the lease.
            while subject.held_by(1) < 200 and subject.finished() < load.rollouts:
                sleep(0.05)
            os.kill(subject.worker_pids[1], signal.SIGKILL)
            killed_at.append(monotonic())

        killer = threading.Thread(target=kill)
        mock.reset(load.behaviour)
        finished = subject.run_once(load, mock, meanwhile=killer.start)
        beyond_s = monotonic() - killed_at[0] - lease_s
        killer.join()
        seen = mock.stats(expected=load.rollouts)
        again = subject.executed_again()
    note = f"{finished} of {load.rollouts} finished; lease {lease_s:g} s"
    return [
        Figure("G8", "s beyond the lease until all is done", beyond_s, "s", 5, None, True, note),
        Figure("G8", "finished rollouts run again", again, "", 0, None),
        Figure("G8", "calls repeated", seen["calls_repeated"], "", 3 * 250, None),
    ]


def measure_handover() -> list[Figure]:
    """Measure G9: the time from the commit that makes a group of 8 ready to its pull, in W1."""
    load = WORKLOADS["W1"]
    arrived: dict[UUID, float] = {}
    with MockServer() as mock, PipelineSubject(commit_times=True) as subject:
        stop = threading.Event()

        def train() -> None:
            client, step = None, 0
            while not stop.is_set():
                try:
                    client = client or TrainerClient(subject.engine, run=subject.run, consumer="t")
                    batch = client.pull(step, BatchSpec(groups=1), timeout_s=1)
                except (NotReady, NotFound):
                    continue
                arrived[batch.groups[0].group_id] = time()
                step += 1

        trainer = threading.Thread(target=train)
        mock.reset(load.behaviour)
        subject.run_once(load, mock, meanwhile=trainer.start, group=8)
        stop.set()
        trainer.join()
        # The event's row is never updated, so xmin is the transaction that made the group ready.
        query = text("""
            SELECT entity_id, extract(epoch FROM pg_xact_commit_timestamp(xmin))
            FROM events WHERE entity = 'group' AND to_state = 'ready'
        """)
        with subject.engine.connect() as connection:
            ready = {group_id: float(at) for group_id, at in connection.execute(query)}
    waits_ms = [(at - ready[group_id]) * 1000 for group_id, at in arrived.items()]
    cuts = quantiles(waits_ms, n=100)
    note = f"{len(waits_ms)} groups of 8, pulled one at a time"
    return [
        Figure("G9", "ready to pulled, p50", cuts[49], "ms", 20, 10, True, note),
        Figure("G9", "ready to pulled, p99", cuts[98], "ms", 100, 50, True, note),
    ]


def measure_store(
    *, rows: int, pairs: int, prompts: int = 100_000
) -> tuple[list[Figure], list[StoreTimes]]:
    """Measure G10 to G13 on one durable server."""
    with private_store() as (engine, folder):
        copies = [measure_enqueue(engine, prompts=prompts) for _ in range(min(pairs, 3))]
        cycles = [
            (
                measure_cycles(engine, cycles=_CYCLES),
                measure_pgbench(engine, folder, seconds=_CYCLES_S),
            )
            for _ in range(pairs)
        ]
        times = measure_growth(engine, rows=rows)
    empty_ms, deep_ms = measure_publish(depth=rows // 10)
    small, large = times[0], times[-1]
    ours, raw = (median(pair[side] for pair in cycles) for side in (0, 1))
    enqueue_s, copy_s = (median(pair[side] for pair in copies) for side in (0, 1))
    enqueued = median(ours_s / copy_s for ours_s, copy_s in copies)
    cycled = median(ours / bench for ours, bench in cycles)
    stored = f"{rows:,} rollouts in the store, {large.queued:,} queued"
    copied = f"{enqueue_s:.1f} s / {copy_s:.1f} s"
    pulled = f"{large.pull_ms:.2f} ms / {large.raw_pull_ms:.2f} ms; {stored}"
    published = f"{rows // 10:,} on the broker, {deep_ms:.1f} ms / none, {empty_ms:.1f} ms"
    pull_ratio, publish_ratio = large.pull_ms / large.raw_pull_ms, deep_ms / empty_ms
    cycle_rates = f"{ours:.0f}/s / {raw:.0f}/s"
    grown = [
        (name.replace("_", " "), getattr(large, f"{name}_ms") / getattr(small, f"{name}_ms"))
        for name in ("pull", "short_pull", "claim", "enqueue", "ingest", "cancel", "export")
    ]
    return [
        Figure("G10", f"enqueue {prompts:,} prompts / COPY", enqueued, "", 5, 3, note=copied),
        Figure("G11", "pull 8 × 20 KB / raw SQL", pull_ratio, "", 3, 2, note=pulled),
        Figure("G11", "pull 8 × 20 KB", large.pull_ms, "ms", 3, None, note=stored),
        Figure("G12", "store cycles / pgbench", cycled, "", 0.25, 0.5, False, cycle_rates),
        *(
            Figure("G13", f"{name}, growth", growth, "", 1.5, 1.2, note=f"over {small.rollouts:,}")
            for name, growth in grown
        ),
        Figure("G13", "publish 256 requests, growth", publish_ratio, "", 1.5, 1.2, note=published),
        Figure("", "status of a run", large.status_ms, "ms", 200, None, note=stored),
        Figure("", "error summary of a run", large.errors_ms, "ms", 200, None, note=stored),
    ], times


def _complete(found: Comparison) -> str:
    runs = [subject for _, subject in found.pairs]
    finished = sum(run.finished for run in runs)
    return f"{finished} of {sum(run.rollouts for run in runs)} finished"


PARTS: Mapping[str, Callable[[], list[Figure]]] = MappingProxyType(
    {"concurrency": measure_concurrency, "kill": measure_kill, "handover": measure_handover}
)
