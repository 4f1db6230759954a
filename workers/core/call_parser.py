"""Parse tool calls: text such as `name(a=1, b='x, y')`, and JSON arguments.

Used by `reply_parser` and for the arguments of native calls. `ast` reads Python syntax, of which
only literals are accepted. Must not: evaluate an expression, or raise anything but `CallParseError`
for any text of a model.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_CALL_CHARS = 100_000
MAX_NESTING = 50
MAX_INTEGER_BITS = 13_000  # below the size at which Python refuses to write an int as text

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_OPEN, _CLOSE = "([{", ")]}"
_NAMED_LITERALS = {"true": True, "false": False, "null": None}


class CallParseError(ValueError):
    """A tool call that cannot be parsed; the message is for the model."""


class ParsedCall(NamedTuple):
    """A tool call: its name, its named arguments, and positional values without a name yet."""

    name: str
    args: dict[str, Any]
    positional: tuple[Any, ...] = ()

    def bind(self, parameter_names: Sequence[str]) -> ParsedCall:
        """Give positional values the names of the parameters, in their order.

        Raises:
            CallParseError: There are more values than names, or a name is given twice.
        """
        if not self.positional:
            return self
        if len(self.positional) > len(parameter_names):
            example = parameter_names[0] if parameter_names else "parameter"
            raise CallParseError(
                f"{self.name} was called with {len(self.positional)} values without a name; "
                f"name them, as in {self.name}({example}=...)"
            )
        args = dict(zip(parameter_names, self.positional, strict=False))
        if twice := sorted(args.keys() & self.args.keys()):
            raise CallParseError(f"{self.name} was given {', '.join(twice)} twice")
        return ParsedCall(self.name, {**args, **self.args})


def parse_call(text: str) -> ParsedCall:
    """Parse a text that is one call: `name(...)`, with Python literals or one JSON object.

    Raises:
        CallParseError: The text is no such call, has other values than literals, or is too long or
            too deeply nested.
    """
    text = text.strip()
    end = find_call_end(text)
    if text[end:].strip(" \t\r\n.;`"):
        raise CallParseError(f"unexpected text after the call: {_shorten(text[end:])}")
    return _read_call(text[:end])


def find_call_end(text: str, start: int = 0) -> int:
    """Return the index just after the call which begins at `start` with its name.

    Brackets inside quotes do not count.

    Raises:
        CallParseError: The name or the bracket is missing, or the bracket never closes.
    """
    name = _NAME.match(text, start)
    if not name:
        raise CallParseError("a tool call begins with the tool's name, as in name(a=1)")
    open_at = name.end()
    while open_at < len(text) and text[open_at] in " \t":
        open_at += 1
    if open_at >= len(text) or text[open_at] != "(":
        raise CallParseError(f"expected '(' after {name.group()}, as in {name.group()}(a=1)")
    return _matching_bracket(text, open_at) + 1


def parse_json_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a native tool call; empty text is no arguments.

    Besides a JSON object, the text may be a Python dict, or a JSON text that contains the object.

    Raises:
        CallParseError: The text is not an object, or is too long or too deeply nested.
    """
    text = text.strip()
    _check_size(text)
    if not text:
        return {}
    value, end = parse_value(text)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        # Some models encode the arguments twice.
        text = value.strip()
        value, end = parse_value(text)
    if end < len(text):
        raise CallParseError(f"the arguments are not valid JSON: {_shorten(text[end:])} follows")
    if not isinstance(value, dict):
        raise CallParseError(f"the arguments must be a JSON object, not {_json_kind(value)}")
    return value


def parse_value(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value or Python dict or list that begins at `start`, and the index behind it.

    Raises:
        CallParseError: There is no such value, or it is too long or too deeply nested.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except CallParseError:
        raise
    except (ValueError, RecursionError) as error:
        value, end = _python_value(text, start, f"the arguments are not valid JSON: {error}")
    _check_size(text[start:end])
    if isinstance(value, dict | list):
        _check_nesting(value)
    return value, end


def _python_value(text: str, start: int, problem: str) -> tuple[Any, int]:
    if text[start : start + 1] not in ("{", "["):
        raise CallParseError(problem)
    try:
        end = _matching_bracket(text, start) + 1
        call = _read_python("the call", text[start:end])
    except CallParseError:
        # The problem of the JSON text explains more, because JSON was asked for.
        raise CallParseError(problem) from None
    return (call.positional[0] if call.positional else call.args), end


def _read_call(source: str) -> ParsedCall:
    name = source[: source.index("(")].strip()
    body = source[source.index("(") + 1 : -1].strip()
    if body.startswith("{") and body.endswith("}"):
        try:
            return ParsedCall(name, parse_json_arguments(body))
        except CallParseError:
            pass  # it may still be a Python dict literal
    return _read_python(name, body)


def _read_python(name: str, body: str) -> ParsedCall:
    try:
        tree = _python_tree(body)
    except SyntaxError as error:
        try:
            tree = _python_tree(_escape_newlines(body))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise CallParseError(
                f"cannot read the arguments of {name}: {error.msg}; write them as Python values"
            ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise CallParseError(
            f"cannot read the arguments of {name}: {_shorten(str(error) or 'too complex')}"
        ) from None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise CallParseError(f"cannot read the arguments of {name}: unexpected text after them")
    return _from_tree(name, tree)


def _python_tree(body: str) -> ast.expr:
    with warnings.catch_warnings():
        # A model's '\\d' in a plain string gives a SyntaxWarning that is not ours.
        warnings.simplefilter("ignore")
        return ast.parse(f"_({body}\n)", mode="eval").body


def _escape_newlines(body: str) -> str:
    """Escape real newlines inside quotes, which models write and Python refuses."""
    parts: list[str] = []
    at = 0
    while at < len(body):
        if body[at] in "'\"":
            end = _string_end(body, at, len(body))
            text = body[at:end]
            parts.append(text if text[:3] in ("'''", '"""') else text.replace("\n", "\\n"))
            at = end
        else:
            parts.append(body[at])
            at += 1
    return "".join(parts)


def _from_tree(name: str, tree: ast.Call) -> ParsedCall:
    args: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise CallParseError(f"{name}: '**' is not allowed; name each argument")
        if keyword.arg in args:
            raise CallParseError(f"{name} was given {keyword.arg} twice")
        args[keyword.arg] = _literal(keyword.value, name)
    positional = tuple(_literal(node, name) for node in tree.args)
    # A single dict is an object of arguments in Python syntax.
    if len(positional) == 1 and not args and isinstance(positional[0], dict):
        if not all(isinstance(key, str) for key in positional[0]):
            raise CallParseError(f"{name}: the names of arguments must be text")
        return ParsedCall(name, positional[0])
    return ParsedCall(name, args, positional)


def _literal(node: ast.expr, name: str) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None):
            return _bounded(node.value, name)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, name) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key, name): _literal(value, name) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -_bounded(number, name)
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return _bounded(number, name)
        case ast.Name(id=literal) if literal in _NAMED_LITERALS:
            return _NAMED_LITERALS[literal]
    raise CallParseError(
        f"{name}: arguments must be plain values (text in quotes, numbers, lists, dicts), "
        f"not {type(node).__name__.lower()}"
    )


def _bounded(value: Any, name: str) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise CallParseError(f"{name}: a number in the arguments is too long")
    if isinstance(value, float) and not math.isfinite(value):
        raise CallParseError(f"{name}: a number in the arguments is too large")
    return value


def _key(node: ast.expr | None, name: str) -> Any:
    key = _literal(node, name) if node is not None else None
    if not isinstance(key, str | int | float | bool):
        raise CallParseError(f"{name}: the keys of a dict must be text or numbers")
    return key


def _matching_bracket(text: str, open_at: int) -> int:
    """Return the index of the bracket that closes the one at `open_at`."""
    expected: list[str] = []
    at, end = open_at, min(len(text), open_at + MAX_CALL_CHARS)
    while at < end:
        char = text[at]
        if char in "'\"":
            at = _string_end(text, at, end)
            continue
        if char in _OPEN:
            expected.append(_CLOSE[_OPEN.index(char)])
            if len(expected) > MAX_NESTING:
                raise CallParseError(f"the call is nested deeper than {MAX_NESTING} levels")
        elif char in _CLOSE:
            if char != expected.pop():
                raise CallParseError(f"the call's brackets do not match at {char!r}")
            if not expected:
                _check_size(text[open_at : at + 1])
                return at
        at += 1
    if end < len(text):
        raise CallParseError(f"the call is longer than {MAX_CALL_CHARS} characters")
    raise CallParseError("the call's bracket is never closed")


def _string_end(text: str, at: int, end: int) -> int:
    quote = text[at]
    mark = quote * 3 if text.startswith(quote * 3, at) else quote
    at += len(mark)
    while at < end:
        if text[at] == "\\":
            at += 2
        elif text.startswith(mark, at):
            return at + len(mark)
        else:
            at += 1
    if end < len(text):
        raise CallParseError(f"the call is longer than {MAX_CALL_CHARS} characters")
    raise CallParseError(f"a text in the call's arguments is not closed by {mark}")


def _check_size(text: str) -> None:
    if len(text) > MAX_CALL_CHARS:
        raise CallParseError(f"the arguments are longer than {MAX_CALL_CHARS} characters")


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise CallParseError(f"the arguments are nested deeper than {MAX_NESTING} levels")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise CallParseError("a number in the arguments is too large")
    return value


def _refuse_constant(constant: str) -> Any:
    raise CallParseError(f"{constant} is not a JSON value")


def _json_kind(value: Any) -> str:
    return {list: "a list", str: "text", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


def _shorten(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


# strict=False, because models write real newlines in JSON strings.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)
