"""Options and arguments that several commands share, and `takes`, which passes them as one value.

The command modules use it. Must not: import slow modules, because `--help` loads this one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from pipeline.contract.errors import ErrorClass, InputError

F = TypeVar("F", bound=Callable[..., Any])

RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's name, a unique prefix of a name, or @last."),
]
GroupName = Annotated[
    str, typer.Argument(metavar="GROUP", help="A label (math7-g000013) or the prefix of an id.")
]
RolloutName = Annotated[
    str,
    typer.Argument(metavar="ROLLOUT", help="A label (math7-g000013-r3) or the prefix of an id."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; errors too.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be done.", show_default=False)
]

WhileStdin = Annotated[
    bool, typer.Option("--while-stdin", hidden=True, help="End when stdin is closed.")
]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of workers; None means the value of the settings."""

    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="Attempts at once per worker (default: 100)."
        ),
    ] = None
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Module or .py file with agents, tools, rewards."),
    ] = None


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options for the processes and the wait of this command."""

    workers: Annotated[int, typer.Option(min=0, help="Worker processes to start here.")] = 1
    wait: Annotated[
        bool,
        typer.Option("--wait/--detach", help="Wait for the end, or run in the background."),
    ] = True
    wait_timeout_s: Annotated[
        float | None,
        typer.Option(
            "--wait-timeout",
            min=0,
            help="Longest wait, in seconds; then the run's processes are stopped.",
        ),
    ] = None


def parse_error_class(name: str | None) -> ErrorClass | None:
    """Return the error class of this name.

    Raises:
        InputError: No error class has this name.
    """
    if name is not None and name not in list(ErrorClass):
        raise InputError(
            f"There is no error class {name!r}.", remedy=f"Known: {', '.join(ErrorClass)}."
        )
    return None if name is None else ErrorClass(name)


def takes(options: type[Any], parameter: str) -> Callable[[F], F]:
    """Add the fields of a dataclass to a command as options; the function gets one object.

    `@takes(WorkerOptions, "workers")` replaces the parameter `workers` by `--concurrency` and
    `--plugin`.
    """
    hints = get_type_hints(options, include_extras=True)
    fields = dataclasses.fields(options)

    def decorate(function: F) -> F:
        own = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for known in inspect.signature(function).parameters.values():
            if known.name != parameter:
                annotation = own.get(known.name, known.annotation)
                parameters.append(known.replace(annotation=annotation))
                continue
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hints[field.name],
                    default=_default(field),
                )
                for field in fields
            ]

        def command(**values: Any) -> Any:
            taken = {field.name: values.pop(field.name) for field in fields}
            return function(**values, **{parameter: options(**taken)})

        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__module__ = function.__module__
        # Keyword-only, so that an option without a default may follow one with a default.
        command.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        )
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command  # pyright: ignore[reportReturnType]

    return decorate


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
