"""The pull of a large train batch, compared with reading the same arrays from a file.

The tokens are random, so that compression does not help either side. Must not: use a shortcut that
the pipeline does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from sqlalchemy import Engine, text

from benchmarks.report import Figure
from benchmarks.store import completion_of, enqueue_prompts
from benchmarks.store_subject import GROUP, body, private_store, tidy
from pipeline.contract.model_call import ModelCall
from pipeline.contract.trajectory import digest_of
from pipeline.store.engine import transact
from pipeline.store.outcomes import record_outcomes
from pipeline.store.rollouts import claim
from pipeline.tokens.prompt_prefixes import PromptPrefixes
from pipeline.tokens.rows import TokenRow
from pipeline.tokens.token_body import pack_tokens
from pipeline.trainer.client import TrainerClient
from rollout import BatchSpec

_RUN = "tokens"
#: Model calls of a rollout; between two of them a tool's result follows.
_CALLS = 4
_VOCABULARY = 150_000
_ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")
_INGESTED = 64  # completions of one transaction


def measure_pull(*, groups: int, tokens: int, pairs: int) -> list[Figure]:
    """Return the time and the bytes of a pull, and their ratios to those of a file.

    Args:
        groups: Groups of the batch, with 8 rollouts each.
        tokens: Tokens of each rollout, about; a quarter of them is prompts and tool results.
        pairs: Pairs of a pull and a reading of the file.
    """
    with private_store() as (engine, folder):
        _record_rollouts(engine, groups=groups, tokens=tokens)
        client = TrainerClient(engine, run=_RUN, consumer="bench")
        spec = BatchSpec(groups=groups)
        path = folder / "rows.npz"
        write_rows(path, client.pull(0, spec).rows())
        pulls, rows, files = [], [], []
        for _ in range(pairs):
            client.abandon(0, reason="measured")
            started = perf_counter()
            batch = client.pull(0, spec)
            pulled = perf_counter()
            found = batch.rows()
            rows.append(perf_counter() - pulled)
            pulls.append(pulled - started)
            started = perf_counter()
            same = read_rows(path)
            files.append(perf_counter() - started)
            if not _are_equal(found, same):
                raise AssertionError("The file and the batch hold different arrays.")
        client.close()
        stored = transact(engine, lambda c: c.execute(_STORED).scalar_one())
        written = path.stat().st_size
    ratios = [(pull + row) / file for pull, row, file in zip(pulls, rows, files, strict=True)]
    size = f"{groups} × {GROUP} rollouts of {np.mean([len(row.token_ids) for row in found]):,.0f}"
    times = (
        f"pull {_ms(pulls)}, rows {_ms(rows)}, file {_ms(files)}; "
        f"{sum(len(row.token_ids) for row in found) / 1e6:.1f} M tokens"
    )
    return [
        Figure("", f"pull and rows of {size} tokens / a file", median(ratios), note=times),
        Figure(
            "",
            "bytes in the store / in the file",
            stored / written,
            note=f"{stored / 1e6:.1f} MB / {written / 1e6:.1f} MB",
        ),
    ]


def write_rows(path: Path, rows: Sequence[TokenRow]) -> None:
    """Write the arrays of rows to a file, each kind as one array."""
    ids, mask, logprobs, versions = (
        np.concatenate([getattr(row, name) for row in rows]) for name in _ARRAYS
    )
    lengths = np.array([len(row.token_ids) for row in rows])
    np.savez(
        path, lengths=lengths, token_ids=ids, loss_mask=mask, logprobs=logprobs, versions=versions
    )


def read_rows(path: Path) -> dict[str, list[Any]]:
    """Return the arrays of a file, one for each row."""
    with np.load(path) as found:
        ends = np.cumsum(found["lengths"])[:-1]
        return {name: np.split(found[name], ends) for name in _ARRAYS}


_STORED = text("SELECT sum(octet_length(tokens)) FROM trajectories")


def _record_rollouts(engine: Engine, *, groups: int, tokens: int) -> None:
    """Complete all rollouts of a run, as the collector would."""
    run = enqueue_prompts(engine, _RUN, prompts=groups, n=GROUP)
    rng = np.random.default_rng(1)
    record = body()
    while attempts := transact(engine, claim, run, most=_INGESTED, lease_s=600):
        completions = []
        for attempt in attempts:
            packed = pack_tokens(_calls(rng, tokens))
            update = {
                "tokens": packed,
                "tokens_bytes": len(packed),
                "tokens_digest": digest_of(packed),
                "body_digest": digest_of(record),
            }
            completions.append(completion_of(run, attempt, record).model_copy(update=update))
        transact(engine, lambda c, done=completions: record_outcomes(c, done))
    tidy(engine)


def _calls(rng: np.random.Generator, tokens: int) -> list[ModelCall]:
    """Return calls that continue each other: one quarter is given, three quarters are sampled."""
    prefixes, known, calls = PromptPrefixes(), list[int](), list[ModelCall]()
    given, sampled = tokens // _CALLS // 4, tokens // _CALLS * 3 // 4
    for number in range(_CALLS):
        prompt = [*known, *_ids(rng, given)]
        completion = _ids(rng, sampled)
        logprobs = (-rng.random(sampled)).tolist()
        known = [*prompt, *completion]
        calls.append(
            ModelCall(
                sequence=number,
                trainable=True,
                policy_version=1,
                tokens=prefixes.add(number, prompt, completion, logprobs),
            )
        )
    return calls


def _ids(rng: np.random.Generator, n: int) -> list[int]:
    return rng.integers(_VOCABULARY, size=n).tolist()


def _are_equal(rows: Sequence[TokenRow], columns: dict[str, list[Any]]) -> bool:
    return all(
        np.array_equal(getattr(row, name), columns[name][place])
        for place, row in enumerate(rows)
        for name in _ARRAYS
    )


def _ms(times: Sequence[float]) -> str:
    return f"{median(times) * 1000:.0f} ms"
