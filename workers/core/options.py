"""Options of agents, tools and rewards: their names and types, and the check of given values.

Used by the agents, the tool registry and the rewards before they run. Only types that JSON has are
checked; other types accept any value. Must not: convert a value.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

#: Name to the type of its value. A mapping as the type means nested options.
Options = Mapping[str, Any]

_PLAIN = (Any, NoneType, bool, int, float, str, list, dict)
_NESTED = (Union, UnionType, list, dict, Mapping, Sequence)


class OptionError(ValueError):
    """An unknown option, or a value of a wrong type."""


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters that can be given by name, with their types."""
    is_object = not inspect.isroutine(function)
    try:
        hints = get_type_hints(type(function).__call__ if is_object else function)
    except (NameError, TypeError):
        # With annotations that cannot be resolved, any value is accepted.
        hints = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return {
        name: hints.get(name, Any)
        for name, parameter in parameters.items()
        if parameter.kind in by_name and name != "self"
    }


def takes_any(function: Callable[..., Any]) -> bool:
    """Say whether a function has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def check_options(owner: str, given: Mapping[str, Any], known: Options | None) -> None:
    """Check given options.

    Args:
        owner: The owner as the beginning of a sentence: `Agent 'react'`.
        given: Name to value.
        known: The options of the owner; None accepts any.

    Raises:
        OptionError: An option is unknown or of a wrong type; the message suggests a similar name.
    """
    if known is None:
        return
    for name, value in given.items():
        if name not in known:
            raise OptionError(f"{owner} has no option {name!r}. {_known_instead(name, known)}")
        kind = known[name]
        if isinstance(kind, Mapping) and isinstance(value, Mapping):
            check_options(f"{owner}: {name}", value, kind)
        elif problem := _problem(dict if isinstance(kind, Mapping) else kind, value):
            raise OptionError(f"{owner}: {name} cannot be {repr(value)[:80]}: {problem}.")


def _known_instead(name: str, known: Options) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Its options: {', '.join(sorted(known))}." if known else "It takes none."


def _problem(kind: Any, value: Any) -> str:
    """Return the reason why a value does not fit; empty if it fits or cannot be checked."""
    if not _is_json(kind) or not isinstance(value, bool | int | float | str | list | dict):
        return ""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"]
    return ""


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _is_json(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is None:
        return kind in _PLAIN
    return origin is Literal or (origin in _NESTED and all(map(_is_json, get_args(kind))))
