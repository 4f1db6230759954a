"""Commands that take a dataclass as options."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rollout.options import takes


@dataclass(frozen=True)
class Colours:
    paint: Annotated[str, typer.Argument()]
    shade: Annotated[int, typer.Option(min=0)] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True)
class Sizes:
    width: Annotated[int | None, typer.Option("-w")] = None


def make_app(seen: list[Any]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @takes(Colours, "colours")
    @takes(Sizes, "sizes")
    def draw(ctx: typer.Context, colours: Colours, sizes: Sizes, fast: bool = False) -> None:
        """Draw."""
        seen.append((colours, sizes, fast))

    return app


def call(*arguments: str) -> tuple[Colours, Sizes, bool]:
    seen: list[Any] = []
    make_app(seen)(list(arguments), standalone_mode=False)
    return seen[0]


def test_fields_become_options_and_come_back_as_one_value():
    colours, sizes, fast = call("red", "--shade", "7", "--name", "a", "--name", "b", "-w", "2")
    assert colours == Colours("red", 7, ["a", "b"])
    assert sizes == Sizes(2)
    assert not fast


def test_defaults_are_those_of_the_dataclass():
    assert call("red") == (Colours("red"), Sizes(), False)


def test_the_functions_own_name_and_help_stay():
    @takes(Sizes, "sizes")
    def measure(sizes: Sizes) -> None:
        """Measure it."""

    assert (measure.__name__, measure.__doc__) == ("measure", "Measure it.")
    assert list(inspect.signature(measure).parameters) == ["width"]
