"""`rollout runs`, `status`, `watch`: what runs there are, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import counts, note, number, print_json, print_table
from rollout.panel import describe_calls, describe_tools
from rollout.progress import wait_for_run

if TYPE_CHECKING:
    from pipeline.store.status import RunStatus, Score


def runs(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Only the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """List the runs, newest first."""
    from pipeline.store.runs import list_runs
    from pipeline.store.status import run_status

    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: [
                (run, run_status(connection, run)) for run in list_runs(connection, limit=limit)
            ]
        )
    if as_json:
        print_json(
            {
                "runs": [
                    status.to_json() | {"created_at": run.created_at.isoformat()}
                    for run, status in found
                ]
            }
        )
        return
    print_table(
        ("run", "state", "created", "rollouts", "succeeded", "failed", "reward", "ready groups"),
        [
            (
                run.slug,
                status.state,
                f"{run.created_at:%Y-%m-%d %H:%M:%S}",
                status.rollouts["total"],
                status.rollouts["succeeded"],
                status.rollouts["failed"],
                number(status.reward_mean),
                status.groups["ready"],
            )
            for run, status in found
        ],
        right=("rollouts", "succeeded", "failed", "reward", "ready groups"),
    )


#: Exit code of a command that waited for a run that failed.
EXIT_RUN_FAILED = 4


def status(ctx: typer.Context, run: RunName = "@last", as_json: Json = False) -> None:
    """Say how far a run is, and what it waits for."""
    from pipeline.store.runs import get_run
    from pipeline.store.status import run_status

    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: run_status(connection, get_run(connection, run))
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_status(found)


def watch(
    ctx: typer.Context,
    run: RunName = "@last",
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Longest wait.")] = None,
    as_json: Json = False,
) -> None:
    """Follow a run until it is done.

    Ctrl-C ends only this command; the run goes on. Exit code 4 says that the run failed.
    """
    from pipeline.store.runs import get_run

    with opened(ctx) as deployment:
        found = deployment.transact(lambda connection: get_run(connection, run))
        try:
            final = wait_for_run(deployment, found, timeout_s=timeout_s)
        except KeyboardInterrupt:
            note(f"The run goes on. Watch it again: rollout watch {found.slug}")
            raise typer.Exit(130) from None
    if as_json:
        print_json(final.to_json())
    else:
        print_status(final)
    raise typer.Exit(exit_code(final, go_on="continue"))


def exit_code(final: RunStatus, *, go_on: str) -> int:
    """Return how a command that waited for a run ends; say why it does not end with 0.

    Args:
        final: The run's figures at the end of the wait.
        go_on: The command that goes on with a paused run.
    """
    run, failed = final.run, final.rollouts["failed"]
    if failed:
        note(f"{failed} of {final.rollouts['total']} rollouts failed. See: rollout errors {run}")
    if not final.has_failed:
        return 0
    allowed = f"more than the {final.allowed_error_rate:.0%} that are allowed"
    why = allowed if final.is_done else f"it is paused because {final.state_reason}"
    note(
        f"Run {run} has failed: {why}. When the cause is mended, queue the failed rollouts again "
        f"(rollout retry {run}) and go on (rollout {go_on} {run})."
    )
    return EXIT_RUN_FAILED


def print_status(status: RunStatus) -> None:
    """Print a run's figures for a person."""
    rows: list[tuple[str, Any]] = [
        ("state", status.state),
        ("groups", counts(status.groups)),
        ("rollouts", _rollouts(status)),
        ("reward", reward_text(status)),
        ("attempts", status.attempts),
        ("retries", status.retries),
        ("errors", counts(status.errors)),
        *(("model calls", line) for line in describe_calls(status)),
        *([("tools", describe_tools(status))] if status.activity.tools else []),
        ("tokens", f"{status.prompt_tokens:,} prompt, {status.completion_tokens:,} completion"),
        ("elapsed", f"{status.elapsed_s:.1f} s"),
    ]
    if status.drops:
        rows.insert(2, ("dropped", counts(status.drops)))
    if status.sums.cut:
        share = f"{status.sums.cut_share:.0%} of {status.sums.rollouts} rollouts"
        rows.insert(2, ("cut", f"{status.sums.cut}, {share}: not needed or not in time"))
    rows.insert(2, ("sum", f"{status.sums}{'' if status.sums.adds_up else ' (DOES NOT ADD UP)'}"))
    print_table(("run", status.run), rows)
    if len(status.scores) > 1:
        print_scores(status.scores)
    for sentence in (*status.waits, *status.warnings):
        print(sentence)


def print_scores(scores: Sequence[Score]) -> None:
    """Print the mean of each reward, its parts included."""
    print_table(
        ("scored by", "version", "trajectories", "mean"),
        [(each.name, each.version, each.n, number(each.mean)) for each in scores],
        right=("trajectories", "mean"),
    )


def _rollouts(status: RunStatus) -> str:
    total = status.rollouts["total"]
    by_state = {name: n for name, n in status.rollouts.items() if name != "total"}
    return f"{total}: {counts(by_state)}"


def reward_text(status: RunStatus) -> str:
    """Return a run's mean reward with its standard error, and what it is taken over."""
    if status.reward_mean is None:
        return "none yet"
    over = f"{status.reward_n} rollouts of {status.reward_prompts} prompts"
    if status.reward_stderr is None:
        return f"{number(status.reward_mean)} (mean of {over})"
    mean = f"{number(status.reward_mean)} ± {number(status.reward_stderr)}"
    return f"{mean} (mean ± standard error, {over})"
