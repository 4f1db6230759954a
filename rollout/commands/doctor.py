"""`rollout doctor`: checks of this machine and the services, with remedies; changes nothing."""

from __future__ import annotations

from dataclasses import asdict

import typer

from rollout.checks import run_checks
from rollout.options import Json
from rollout.output import print_json, print_table


def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """Check this machine and the configured services.

    Each problem is shown with its remedy.
    """
    checks = list(run_checks(ctx))
    failed = [check for check in checks if check.status == "failed"]
    if as_json:
        rows = [
            {name: value for name, value in asdict(check).items() if name != "exit_code"}
            for check in checks
        ]
        print_json({"ok": not failed, "checks": rows})
    else:
        print_table(
            ("check", "", "found", "what to do"),
            [(check.name, check.status, check.detail, check.remedy) for check in checks],
        )
    raise typer.Exit(failed[0].exit_code if failed else 0)
