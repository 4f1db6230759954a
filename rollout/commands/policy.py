"""`rollout policy publish`, `list`: the versions of the weights that a run's rollouts come from."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.contract.policy import PolicyMode, check_publication
from pipeline.store.policies import list_policies, publish_policy
from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import print_answer, print_json, print_table

policy = typer.Typer(no_args_is_help=True)


@policy.command("publish")
def publish(
    ctx: typer.Context,
    run: RunName,
    version: Annotated[int, typer.Argument(min=0, help="Version of the weights; ascending.")],
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Base URL that serves it; more than once: replicas."),
    ] = None,
    uri: Annotated[str | None, typer.Option(help="Where the weights are; kept with it.")] = None,
    mode: Annotated[
        PolicyMode,
        typer.Option(help="Model calls finish (keep), are repeated (abort) or wait (pause)."),
    ] = "keep",
    as_json: Json = False,
) -> None:
    """Make a version of the weights the current one.

    Repeating the command changes nothing. A run that is paused by `--mode pause` goes on when its
    next version is published, or the same one with another mode.
    """
    urls = check_publication(version, endpoint, mode)
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        is_new = deployment.transact(
            publish_policy, found, version, endpoints=urls, uri=uri, mode=mode
        )
    print_answer(
        {"run": found.slug, "version": version, "mode": mode, "changed": is_new},
        f"Version {version} {'is now' if is_new else 'was already'} the policy of {found.slug}.",
        as_json=as_json,
    )


@policy.command("list")
def list_(
    ctx: typer.Context,
    run: RunName,
    limit: Annotated[int, typer.Option(min=1, help="Only the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """List the published versions of a run, newest first."""
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        published = deployment.transact(list_policies, found.run_id, most=limit)
    if as_json:
        versions = [
            each._asdict() | {"published_at": each.published_at.isoformat()} for each in published
        ]
        print_json({"run": found.slug, "versions": versions})
        return
    print_table(
        ("version", "published", "mode", "endpoints", "weights"),
        [
            (
                each.version,
                f"{each.published_at:%Y-%m-%d %H:%M:%S}",
                each.mode,
                ", ".join(each.endpoints) or "the run's",
                each.uri or "",
            )
            for each in published
        ],
        right=("version",),
    )
