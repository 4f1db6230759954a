"""`rollout config show`: the effective settings, and the source of each.

Secrets are shown as `***`; in a URL only the passwords are hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from pipeline.contract.url_secrets import hide_secret
from pipeline.settings import load_settings, settings_layers
from rollout.options import Json
from rollout.output import print_json, print_table

config = typer.Typer(no_args_is_help=True)


@config.command()
def show(
    ctx: typer.Context,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also show the source of each value.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print every setting with its value."""
    settings = load_settings(overrides=ctx.obj)
    values = {name: _plain(value) for name, value in _values(settings.model_dump())}
    origins = _origins(settings_layers(overrides=ctx.obj)) if origin else {}
    if as_json:
        print_json(
            {
                "settings": {
                    name: {"value": value, "origin": origins.get(name, "default")}
                    if origin
                    else value
                    for name, value in values.items()
                }
            }
        )
        return
    rows = [
        (name, _text(value), *((origins.get(name, "default"),) if origin else ()))
        for name, value in values.items()
    ]
    print_table(("setting", "value", *(("origin",) if origin else ())), rows)


def _origins(layers: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source, layer in layers:
        for name, _ in _values(layer):
            found[name] = source
    return found


def _values(layer: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in layer.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return hide_secret(value.get_secret_value())
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return str(value)
