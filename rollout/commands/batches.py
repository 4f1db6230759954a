"""`rollout pull`, `commit`: a trainer's operations, by hand or from a script."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from pipeline.contract.train_batch import DEFAULT_STALENESS, BatchSpec
from pipeline.queue.payloads import open_payloads
from pipeline.trainer.client import TrainerClient
from rollout.batch_tables import print_pulled
from rollout.deployment import Deployment, opened
from rollout.options import Json, RunName
from rollout.output import print_answer

Consumer = Annotated[str, typer.Option(metavar="NAME", help="The trainer; part of a batch's key.")]
Step = Annotated[int, typer.Option(min=0, help="The trainer's step; part of a batch's key.")]


def pull(
    ctx: typer.Context,
    run: RunName,
    consumer: Consumer,
    step: Step,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Groups in the batch (default: 16).")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Sampled tokens in the batch, instead of groups.")
    ] = None,
    min_group_size: Annotated[int, typer.Option(min=1, help="Usable rollouts of a group.")] = 2,
    full: Annotated[
        bool, typer.Option("--full", help="Only groups without an error rollout.")
    ] = False,
    policy_version: Annotated[
        int | None,
        typer.Option(min=0, help="Version of the weights being trained; older groups are dropped."),
    ] = None,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Versions that a group may be behind --policy-version.")
    ] = DEFAULT_STALENESS,
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait for the groups.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Lease the batch of a trainer step.

    Repeating a step gives the same groups in the same order.
    """
    if groups is not None and tokens is not None:
        raise InputError("--groups and --tokens exclude each other.", remedy="Give one of them.")
    spec = BatchSpec(
        groups=groups,
        tokens=tokens,
        min_group_size=min_group_size,
        require_full_groups=full,
        max_staleness=max_staleness,
    )
    with opened(ctx) as deployment:
        client = _client(deployment, deployment.find_run(run).slug, consumer)
        batch = client.pull(step, spec, policy_version=policy_version, timeout_s=timeout_s)
    print_pulled(batch, as_json=as_json)


def commit(
    ctx: typer.Context,
    run: RunName,
    consumer: Consumer,
    step: Step,
    checkpoint_uri: Annotated[str | None, typer.Option(help="Kept with the batch.")] = None,
    as_json: Json = False,
) -> None:
    """Consume the batches of all steps up to this one.

    Repeating the command changes nothing.
    """
    with opened(ctx) as deployment:
        slug = deployment.find_run(run).slug
        consumed = _client(deployment, slug, consumer).commit(step, checkpoint_uri=checkpoint_uri)
    print_answer(
        {"run": slug, "consumer": consumer, "step": step, "groups": consumed},
        f"{consumed} groups of run {slug} are consumed, up to step {step}.",
        as_json=as_json,
    )


def _client(deployment: Deployment, slug: str, consumer: str) -> TrainerClient:
    payloads = open_payloads(deployment.settings)
    return TrainerClient(deployment.engine, run=slug, consumer=consumer, payloads=payloads)
