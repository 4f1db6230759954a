"""The demo's final output: figures, errors, a train batch, and the next commands to try."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb
from typing import Any

from pipeline.store.run_errors import errors_by_class
from pipeline.store.runs import Run
from pipeline.store.samples import count_correct
from pipeline.store.status import RunStatus
from rollout.batch_tables import print_batch
from rollout.deployment import Deployment
from rollout.output import console, counts, number, print_table
from rollout.tables import print_errors, reward_text
from rollout.tool_errors import errors_by_tool

_NEXT = """\
Next, with your own endpoint (or the stand-in, in another terminal):

  rollout offline-policy --port 8399 --answer-key FILE.jsonl
  rollout run FILE.jsonl --agent react --tools calculator --reward gsm8k -n 4 \\
      --base-url http://127.0.0.1:8399/v1
  rollout status           the run's progress
  rollout errors           the run's errors
  rollout show rollout RUN-g000000-r0 --messages
  rollout pull @last --consumer trainer --step 0 --groups 4
  rollout export @last --to jsonl -o rollouts.jsonl
  rollout down             stop the private servers
"""


def summary_json(deployment: Deployment, run: Run, status: RunStatus) -> dict[str, Any]:
    """Return the figures of `rollout status` and pass@k as one document."""
    rates = _pass_rates(deployment, run)
    return status.to_json() | {
        "drops": status.drops,
        "retries": status.attempts - status.rollouts["total"],
        "pass": {f"@{k}": rate for k, rate in rates.items()},
        "rollouts_per_s": round(status.rollouts["total"] / max(status.elapsed_s, 0.001), 1),
    }


def print_summary(deployment: Deployment, run: Run, status: RunStatus, batch: Any) -> None:
    """Print figures, errors, a train batch, and the next commands to try."""
    total = status.rollouts["total"]
    rows: list[tuple[str, Any]] = [
        ("rollouts", f"{total}: {counts(_ended(status))}"),
        ("attempts", f"{status.attempts} ({status.attempts - total} retries)"),
        ("groups", counts(status.groups)),
        ("dropped", counts(status.drops)),
        ("reward", reward_text(status)),
        *(
            (f"pass@{k}", number(rate))
            for k, rate in _pass_rates(deployment, run).items()
            if rate is not None
        ),
        ("error rollouts", counts(status.errors)),
        ("speed", f"{total / max(status.elapsed_s, 0.001):.0f} rollouts/s"),
    ]
    print_table(("the demo run", ""), rows)
    _print_failures(deployment, run)
    if batch is not None:
        print("A train batch of complete groups, as a trainer would pull it:")
        print_batch(batch)
    console().print(_NEXT)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n tries, drawn without replacement, include a correct one.

    The estimator is that of Chen et al. 2021: `1 - C(n - correct, k) / C(n, k)`.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"no pass@{k} of {correct} correct in {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def mean_pass_at_k(groups: Iterable[tuple[int, int]], k: int) -> float | None:
    """Return the mean pass@k over groups of (tries, correct); None if no group has k tries."""
    rates = [pass_at_k(n, correct, k) for n, correct in groups if n >= k]
    return sum(rates) / len(rates) if rates else None


def _print_failures(deployment: Deployment, run: Run) -> None:
    print("Injected failures. Most were retried, the rest are error rollouts:")
    print_errors(deployment.transact(errors_by_class, run), by="class")
    print_errors(errors_by_tool(deployment, run), by="tool")


def _pass_rates(deployment: Deployment, run: Run) -> dict[int, float | None]:
    """Return pass@1 and pass@n; a failed rollout counts as a try without a correct answer."""
    groups = deployment.transact(count_correct, run)
    return {k: mean_pass_at_k(groups, k) for k in sorted({1, run.config.n})}


def _ended(status: RunStatus) -> dict[str, int]:
    return {name: status.rollouts[name] for name in ("succeeded", "failed", "cancelled")}
