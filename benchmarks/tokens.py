"""Measures G14 and G15: the bytes and the CPU of long conversations with token ids.

`python -m benchmarks tokens` runs it. The bytes are those in the store, after the last run. Must
not: print.
"""

from __future__ import annotations

from sqlalchemy import Engine, text

from benchmarks.mock_server import MockServer
from benchmarks.pairs import Comparison, compare
from benchmarks.pipeline_subject import PipelineSubject
from benchmarks.report import Figure
from benchmarks.subjects import BareLoop
from benchmarks.workloads import Workload
from pipeline.contract.trajectory import decompress
from pipeline.tokens.segments import merge_calls
from pipeline.tokens.token_body import unpack_tokens

#: Bytes of the id and the logprob of a token.
_PACKED_BYTES = 8

_STORED = text("""
SELECT count(*) AS n, avg(tokens_bytes) AS tokens_bytes, avg(body_bytes) AS body_bytes,
       min(tokens) AS tokens
FROM trajectories JOIN rollouts USING (rollout_id) JOIN runs USING (run_id) WHERE slug = :run
""")


def measure_tokens(workload: Workload, *, pairs: int) -> tuple[list[Figure], Comparison]:
    """Run the workload and B3 in turn, and look at what was stored.

    Raises:
        RuntimeError: A stored trajectory lacks tokens of its conversation.
    """
    at_once = workload.in_flight
    with MockServer() as mock, PipelineSubject(concurrency=at_once, server="vllm") as subject:
        found = compare(BareLoop("B3"), subject, workload, mock, pairs=pairs)
        stored = _stored_figure(subject.engine, subject.run, workload)
    calls = workload.behaviour.turns
    baseline, ours = found.medians(lambda measured: measured.cpu_ms_per_rollout / calls)
    finished = sum(run.finished for _, run in found.pairs)
    note = f"{ours:.2f} / {baseline:.2f} ms; {finished} of {pairs * workload.rollouts} finished"
    name = "W3 CPU per call / B3"
    return [stored, Figure("G15", name, found.ratio("cpu"), "", 1.5, None, True, note)], found


def _stored_figure(engine: Engine, run: str, workload: Workload) -> Figure:
    with engine.connect() as connection:
        row = connection.execute(_STORED, {"run": run}).one()
    context = workload.behaviour.context_tokens
    body = bytes(row.tokens or b"")
    segments = merge_calls(unpack_tokens(body)).segments
    if [len(segment.token_ids) for segment in segments] != [context]:
        raise RuntimeError(f"{run}: a trajectory has not one segment of {context} tokens")
    packed = len(decompress(body))
    note = (
        f"{packed:,} bytes before compression; {row.tokens_bytes:,.0f} stored, "
        f"and {row.body_bytes:,.0f} of the text"
    )
    name = "W3 bytes per trajectory / 8 bytes a token"
    return Figure("G14", name, packed / (_PACKED_BYTES * context), "", 1.3, None, True, note)
