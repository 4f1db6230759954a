"""The command `rollout`: which commands there are, and how they end.

The console script calls `main`. Command modules import what is heavy inside their functions, so
that help and completion answer at once. Must not: know what a command does.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pipeline.contract.errors import PipelineError
from pipeline.hidden_packages import explain_hidden
from rollout.commands import (
    batches,
    configuration,
    dashboard,
    database,
    dlq,
    doctor,
    errors,
    limits,
    listing,
    operations,
    policy,
    removal,
    rescore,
    run,
    runs,
    samples,
    servers,
    show,
    submit,
    workers,
)
from rollout.demo import command as demo
from rollout.grouped_commands import GroupedCommands
from rollout.options import GlobalFlags
from rollout.output import print_error, write_in_any_encoding

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

E_BUG = "E001"
E_USAGE = "E002"
E_INTERRUPTED = "E003"

#: Every command, in the groups and the order of the help.
COMMANDS: Final[dict[str, dict[str, Any]]] = {
    "Start": {
        "demo": demo.demo,
        "doctor": doctor.doctor,
        "list": listing.list_,
        "run": run.run,
        "submit": submit.submit,
        "resume": run.resume,
    },
    "Runs": {
        "runs": runs.runs,
        "status": runs.status,
        "watch": runs.watch,
        "show": show.show,
        "samples": samples.samples,
        "errors": errors.errors,
        "retry": operations.retry,
        "rescore": rescore.rescore,
        "pause": operations.pause,
        "continue": operations.continue_,
        "cancel": operations.cancel,
        "rm": removal.rm,
    },
    "Trainer": {
        "pull": batches.pull,
        "commit": batches.commit,
        "export": batches.export,
    },
    "Services": {
        "up": servers.up,
        "down": servers.down,
        "ps": servers.ps,
        "worker": workers.worker,
        "controller": workers.controller,
        "limits": limits.limits,
        "flower": dashboard.flower,
        "offline-policy": policy.offline_policy,
    },
    "Maintenance": {
        "dlq": dlq.dlq,
        "db": database.db,
        "config": configuration.config,
    },
}


class _Commands(GroupedCommands):
    groups = COMMANDS


app = typer.Typer(
    name="rollout",
    cls=_Commands,
    help="Durable rollouts for agentic RL and evaluation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes are for people: a pipe gets plain text, whatever FORCE_COLOR or a CI say.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"rollout {version('rollout-pipeline')}")
        raise typer.Exit


@app.callback()
def rollout(
    ctx: typer.Context,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Private servers, payloads and logs (default: .rollout)."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use this profile of rollout.toml.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR; logs go to stderr.")
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Hold what all commands share."""
    ctx.obj = GlobalFlags(data_dir=data_dir, profile=profile, log_level=log_level)


for _group, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_group)
        else:
            app.command(_name, rich_help_panel=_group)(_command)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    write_in_any_encoding()
    code = run_command(sys.argv[1:] if argv is None else argv)
    if code == EXIT_INTERRUPTED:
        # Where the interruption hit code that was compiled from a string, CPython remembers it
        # and would end by a signal, although it was handled.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code; every failure is reported, none escapes."""
    as_json = "--json" in arguments
    try:
        return _invoke(arguments)
    except PipelineError as error:
        print_error(error.code, error.what, error.why, error.remedy, as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print_error(E_INTERRUPTED, "Interrupted.", as_json=as_json)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    # Broad on purpose: the last stop before the interpreter; whatever comes here is our bug.
    except Exception as error:
        return _report(error, as_json=as_json)


def _invoke(arguments: list[str]) -> int:
    if "_ROLLOUT_COMPLETE" in os.environ:
        app(arguments, prog_name="rollout")
    # Not `app(...)`: that has ends of its own for interruptions and closed pipes.
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("rollout", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _report(error: Exception, *, as_json: bool) -> int:
    if isinstance(error, ImportError) and (hidden := explain_hidden(error)):
        print_error(hidden.code, hidden.what, hidden.why, hidden.remedy, as_json=as_json)
        return hidden.exit_code
    format_message: Any = getattr(error, "format_message", None)
    if format_message is None:
        traceback.print_exception(error)
        first_line = (str(error).splitlines() or [""])[0]
        what = f"This is a bug: {type(error).__name__}: {first_line}"
        print_error(E_BUG, what, remedy="Please report it with the traceback.", as_json=as_json)
        return 1
    # A usage error of the option parser, whichever package it comes from.
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "rollout"
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(format_message() + "\n")
        return 2
    print_error(E_USAGE, format_message(), remedy=f"See: {path} --help", as_json=as_json)
    return 2
