"""What a run asks for, made of the options of `run` and `submit`.

Used by `submit.py`. Must not: ask a server.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import InputError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from pipeline.contract.run import RunConfig
    from rollout.commands.submit import SubmitOptions

E_OPTION = "E106"


def run_config(options: SubmitOptions, defaults: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that the options ask for.

    Args:
        options: Those of the command.
        defaults: What the settings say of every run, below the options.

    Raises:
        InputError: One of them cannot work.
    """
    from pydantic import ValidationError

    from pipeline.contract.run import RunConfig

    values: dict[str, Any] = copy.deepcopy(dict(defaults))
    for name in ("agent", "model", "base_url", "n", "max_attempts", "max_error_rate", "purpose"):
        _put(values, name, getattr(options, name))
    _put(values, "queue", options.queue)
    if options.tools is not None:
        values["tools"] = [name.strip() for name in options.tools.split(",") if name.strip()]
    if options.reward is not None:
        values["reward"] = None if options.reward == "none" else options.reward
    for name in ("max_steps", "max_tokens", "timeout_s"):
        _put(values, f"limits.{name}", getattr(options, name))
    for name in ("temperature", "seed"):
        _put(values, f"sampling.{name}", getattr(options, name))
    for assignment in options.on_error or ():
        error_class, action = _halves(assignment, "--on-error CLASS=ACTION")
        _put(values, f"on_error.{error_class}", action)
    for assignment in options.set or ():
        field, value = _halves(assignment, "--set FIELD=VALUE")
        _put(values, field, _value(value))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _bad_option(error) from error


def _halves(assignment: str, form: str) -> tuple[str, str]:
    left, equals, right = assignment.partition("=")
    if not equals:
        option = form.partition(" ")[0]
        raise InputError(
            f"{option} {assignment} has no `=`.", remedy=f"Write it as {form}.", code=E_OPTION
        )
    return left, right


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    if value is None:
        return
    *sections, name = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"{section} has no field {name}.", code=E_OPTION)
    values[name] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bad_option(error: ValidationError) -> InputError:
    from pipeline.contract.run import RunConfig

    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"] if part != "[key]"]
    if first["type"] == "extra_forbidden":
        model: Any = RunConfig
        for part in place[:-1]:
            model = model.model_fields[part].annotation
        near = difflib.get_close_matches(place[-1], model.model_fields, n=1)
        known = f"Known: {', '.join(model.model_fields)}."
        return InputError(
            f"A run has no field {'.'.join(place)}.",
            remedy=f"Did you mean {near[0]}?" if near else known,
            code=E_OPTION,
        )
    said = first["msg"].removeprefix("Value error, ")
    if not place:
        return InputError(f"These options do not go together: {said}.", code=E_OPTION)
    return InputError(f"{'.'.join(place)} cannot be {first.get('input')!r}: {said}.", code=E_OPTION)
