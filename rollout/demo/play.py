"""The demo's run: enqueue it, wait for its end, print the summary.

`rollout demo` imports it while the servers start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.contract.errors import PipelineError
from pipeline.contract.run import RunConfig
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.queue.payloads import open_payloads
from pipeline.store.prompts import PromptSource
from pipeline.store.runs import Run
from pipeline.store.status import RunStatus
from pipeline.trainer.client import TrainerClient
from producers.datasets import Prompt
from producers.demo_prompts import demo_prompts
from producers.enqueue import enqueue
from rollout.demo.machine import MODEL, ReadyMachine
from rollout.demo.summary import print_summary, summary_json
from rollout.deployment import Deployment
from rollout.output import note, print_json
from rollout.progress import wait_for_run

if TYPE_CHECKING:
    from pipeline.trainer.train_batch import TrainBatch

SLUG = "demo"
_WAIT_S = 120.0


def play(machine: ReadyMachine, *, prompts: int, n: int, as_json: bool) -> None:
    """Run the prompts and print the results.

    Raises:
        PipelineError: Most rollouts failed, so the injected failures cannot be the only cause.
    """
    deployment = machine.deployment
    run = _enqueue(deployment, machine.base_url, prompts=prompts, n=n)
    final = wait_for_run(deployment, run, check=machine.check, timeout_s=_WAIT_S)
    batch = _pull(deployment, groups=min(4, prompts))
    if as_json:
        print_json(summary_json(deployment, run, final))
    else:
        print_summary(deployment, run, final, batch)
    _require_success(final)


def _enqueue(deployment: Deployment, base_url: str, *, prompts: int, n: int) -> Run:
    config = RunConfig(
        agent="react",
        tools=("calculator",),
        reward="numeric",
        model=MODEL,
        base_url=base_url,
        sampling={"seed": 0},
        n=n,
        max_attempts=3,
        max_error_rate=1.0,  # the demo decides itself, see _require_success
        backoff_base_s=0.2,
    )
    rows = (
        Prompt(row_no, {"content": row["question"], "answer": row["answer"]})
        for row_no, row in enumerate(demo_prompts(prompts))
    )
    source = PromptSource("arithmetic")
    report = enqueue(deployment.engine, run=SLUG, config=config, source=source, prompts=rows)
    note(f"Enqueued {report.prompts} prompts, {report.rollouts} rollouts.")
    return report.run


def _pull(deployment: Deployment, *, groups: int) -> TrainBatch | None:
    payloads = open_payloads(deployment.settings)
    client = TrainerClient(deployment.engine, run=SLUG, consumer="demo-trainer", payloads=payloads)
    try:
        return client.pull(0, BatchSpec(groups=groups))
    except NotReady:
        return None


def _require_success(final: RunStatus) -> None:
    """Raise an error if more rollouts failed than the injected failures explain."""
    failed, total = final.rollouts["failed"], final.rollouts["total"]
    if failed * 2 > total:
        raise PipelineError(
            f"The demo went wrong: {failed} of {total} rollouts failed.",
            why=f"Error classes: {', '.join(final.errors)}.",
            remedy="Look at the examples above, and see: rollout doctor",
            code="E150",
        )
