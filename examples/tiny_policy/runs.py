"""The runs of the example: how its problems are enqueued, and with which configuration.

The trainer enqueues the prompts of each step; the command enqueues the two greedy evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine

from pipeline.contract.run import AttemptLimits
from pipeline.settings import load_settings
from pipeline.store.engine import open_engine
from pipeline.store.prompts import PromptSource
from producers.datasets import Prompt
from producers.enqueue import EnqueueReport, enqueue
from rollout import RunConfig
from tiny_policy.task import solution

RUN = "calculator"
#: Prompts of a trainer step, and rollouts of each.
GROUPS, ROLLOUTS = 8, 8

_LONGEST_TURN_TOKENS = 8


def open_store() -> Engine:
    """Connect to the store that the environment names."""
    url = load_settings().database.url
    assert url is not None
    return open_engine(url.get_secret_value())


def enqueue_problems(
    store: Engine,
    run: str,
    problems: Sequence[str],
    *,
    model_url: str,
    seed: int,
    step: int = 0,
    greedy: bool = False,
) -> EnqueueReport:
    """Enqueue problems once for each trainer step; again, this adds nothing.

    Args:
        store: The trajectory store.
        run: Name of the run; its steps are epochs of one dataset.
        problems: The problems of the step.
        model_url: The policy server.
        seed: Of the sampling; a repeated attempt of a rollout samples the same tokens.
        step: The trainer step.
        greedy: Evaluate: one rollout of each problem, which takes the likeliest tokens.
    """
    config = RunConfig(
        agent="calculator_user",
        tools=("calculator",),
        reward="exact_match",
        base_url=model_url,
        model="tiny-policy",
        sampling={"temperature": 0.0 if greedy else 1.0, "seed": seed},
        n=1 if greedy else ROLLOUTS,
        limits=AttemptLimits(max_tokens=_LONGEST_TURN_TOKENS, timeout_s=60),
        backoff_base_s=0.2,
    )
    prompts = (
        Prompt(row, {"content": problem, "answer": solution(problem)})
        for row, problem in enumerate(problems)
    )
    source = PromptSource("arithmetic", epoch=step)
    return enqueue(store, run=run, config=config, source=source, prompts=prompts)
