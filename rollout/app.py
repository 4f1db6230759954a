"""The command `rollout`: the table of its commands, and their exit codes and error messages.

The console script calls `main`. A command's module is imported when the command is called, so that
help and completion are fast. Must not: contain the work of a command.
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
from rollout.command_group import CommandGroup
from rollout.output import print_error, write_in_any_encoding
from rollout.signals import EXIT_INTERRUPTED

EXIT_BROKEN_PIPE = 141

E_BUG = "E001"
E_USAGE = "E002"
E_INTERRUPTED = "E003"

#: Every command, in the groups and the order of the help: its function, and its help's first line.
COMMANDS: Final = {
    "Start": {
        "demo": ("demo:demo", "Watch 64 prompts run, 4 rollouts each, with no model."),
        "doctor": ("doctor:doctor", "Check this machine and the configured services."),
        "list": ("listing:list_", "List agents, tools or rewards with their options."),
        "task": ("task:task", "Check coding tasks before a model works on them."),
        "run": ("run:run", "Run a dataset through an agent here, and wait."),
        "submit": ("submit:submit", "Enqueue a dataset for workers that run elsewhere."),
        "resume": ("run:resume", "Resume a run that was interrupted."),
    },
    "Runs": {
        "runs": ("runs:runs", "List the runs, newest first."),
        "status": ("runs:status", "Show a run's progress and the reasons for its waits."),
        "why": ("why:why", "Say why a run's trainer waits."),
        "watch": ("runs:watch", "Follow a run until it is done."),
        "show": ("show:show", "Show a run, a group or a rollout."),
        "samples": ("samples:samples", "Print a few rollouts: question, answer, reward, error."),
        "errors": ("errors:errors", "Count the errors of a run by class, tool or worker."),
        "retry": ("retry:retry", "Queue failed rollouts of a run again."),
        "rescore": ("rescore:rescore", "Score stored trajectories again, without their agents."),
        "pause": ("operations:pause", "Stop dispatching rollouts of a run."),
        "continue": ("operations:continue_", "Dispatch rollouts of a paused run again."),
        "cancel": ("operations:cancel", "End a run before all its rollouts are done."),
        "rm": ("removal:rm", "Delete a run and everything stored of it."),
    },
    "Trainer": {
        "pull": ("batches:pull", "Lease the batch of a trainer step."),
        "commit": ("batches:commit", "Consume the batches of all steps up to this one."),
        "policy": ("policy:policy", "Publish and list the versions of a policy."),
        "drop": ("drop:drop", "Keep a complete group from the trainers."),
        "export": ("export:export", "Write a run's rollouts to a file, one per line."),
    },
    "Services": {
        "up": ("servers:up", "Start servers, a controller and workers in the background."),
        "down": ("servers:down", "Stop all servers and processes of this data directory."),
        "ps": ("processes:ps", "List servers and processes; starts nothing."),
        "worker": ("workers:worker", "Run agents and score their rollouts, many at once."),
        "controller": ("controller:controller", "Run dispatcher, collector and reconciler."),
        "limits": ("limits:limits", "Limit the calls to a model endpoint, live."),
        "gateway": ("gateway:gateway", "Answer model calls of agents on other machines."),
        "flower": ("dashboard:flower", "Show live tasks in the browser, by Flower."),
        "agentcore-local": (
            "agentcore:agentcore_local",
            "Serve an app as AgentCore Runtime does.",
        ),
        "offline-policy": (
            "offline_policy:offline_policy",
            "Serve a stand-in for a model, which answers from rules.",
        ),
    },
    "Maintenance": {
        "dlq": ("dlq:dlq", "List, requeue and drop dead letters."),
        "db": ("database:db", "Upgrade and check the database's schema."),
        "config": ("configuration:config", "Look at the settings."),
    },
}


class _Commands(CommandGroup):
    table = COMMANDS


app = typer.Typer(
    name="rollout",
    cls=_Commands,
    help="Durable rollouts for agentic RL and evaluation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes only on a terminal: a pipe gets plain text, even with FORCE_COLOR or in a CI.
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
    """Take the options that all commands share; None means not given."""
    ctx.obj = {
        "data_dir": str(data_dir) if data_dir else None,
        "profile": profile,
        "log_level": log_level.upper() if log_level else None,
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    write_in_any_encoding()
    code = run_command(sys.argv[1:] if argv is None else argv)
    if code == EXIT_INTERRUPTED:
        # If the interruption hit code that was compiled from a string, CPython would end by
        # SIGINT although the exception was handled.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code; every exception is reported here."""
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
        # The reader of our output has closed it; avoid an error message at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    # Broad on purpose: the outermost handler. Any exception that reaches it is our bug.
    except Exception as error:
        return _report(error, as_json=as_json)


def _invoke(arguments: list[str]) -> int:
    if "_ROLLOUT_COMPLETE" in os.environ:
        app(arguments, prog_name="rollout")
    # Not `app(...)`, because it handles interruptions and closed pipes itself.
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
        message = f"This is a bug: {type(error).__name__}: {first_line}"
        print_error(E_BUG, message, remedy="Please report it with the traceback.", as_json=as_json)
        return 1
    # A usage error of the option parser, of typer or of click.
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "rollout"
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(format_message() + "\n")
        return 2
    print_error(E_USAGE, format_message(), remedy=f"See: {path} --help", as_json=as_json)
    return 2
