"""Conditions on rollouts, written like Python, translated into SQL with bound values.

`error_class == 'agent_bug' and attempts >= 2 and 'timeout' in message` is parsed as Python and
translated node by node; a node that is not in the tables below is refused. Used by
`rollout retry` and `rollout samples`. Must not: evaluate anything.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

from pipeline.contract.errors import InputError

E_CONDITION = "E108"

_EXAMPLE = "For example: --where \"error_class == 'agent_bug' and 'timeout' in message\""
_FORM = "--where takes comparisons of fields with texts and numbers, joined by and, or, not."


class _Term(NamedTuple):
    """A piece of SQL and whether it is a text or a number; NULL is either."""

    sql: str
    kind: Literal["text", "number", "null"]


#: Fields by name, and their SQL in a query over rollouts `r` with one attempt `a` of each.
FIELDS: Mapping[str, _Term] = MappingProxyType(
    {
        "status": _Term("r.state", "text"),
        "reward": _Term("r.reward", "number"),
        "stop_reason": _Term("r.stop_reason", "text"),
        "label": _Term(
            "((SELECT slug FROM runs WHERE runs.run_id = r.run_id) || '-g'"
            " || lpad(CAST(r.group_no AS text), 6, '0') || '-r' || r.rollout_index)",
            "text",
        ),
        "error_class": _Term("r.error_class", "text"),
        "error_code": _Term("a.error_code", "text"),
        "message": _Term("a.error_message", "text"),
        "phase": _Term("a.phase", "text"),
        "worker": _Term("a.worker_id", "text"),
        "group": _Term("r.group_no", "number"),
        "index": _Term("r.rollout_index", "number"),
        "attempts": _Term("r.attempt_no", "number"),
        "lost": _Term("r.lost_count", "number"),
        "turns": _Term("a.n_turns", "number"),
        "tokens": _Term("(a.prompt_tokens + a.completion_tokens)", "number"),
    }
)

_COMPARISONS: Mapping[type[ast.cmpop], str] = MappingProxyType(
    {
        ast.Eq: "IS NOT DISTINCT FROM",
        ast.NotEq: "IS DISTINCT FROM",
        ast.Lt: "<",
        ast.LtE: "<=",
        ast.Gt: ">",
        ast.GtE: ">=",
        ast.Is: "IS NOT DISTINCT FROM",
        ast.IsNot: "IS DISTINCT FROM",
    }
)


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """A condition in SQL and its values; the default is true for every rollout."""

    sql: str = "true"
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    def and_also(self, other: RolloutFilter) -> RolloutFilter:
        """Return the condition that both hold."""
        clashes = self.parameters.keys() & other.parameters.keys()
        assert not clashes, clashes
        return RolloutFilter(
            f"({self.sql}) AND ({other.sql})", {**self.parameters, **other.parameters}
        )


def of_class(error_class: str) -> RolloutFilter:
    """Return the condition that a rollout failed with this class."""
    return RolloutFilter("r.error_class = :error_class", {"error_class": error_class})


def parse_filter(condition: str) -> RolloutFilter:
    """Translate a condition.

    Raises:
        InputError: The condition does not have this form; the error names the part.
    """
    try:
        tree = ast.parse(condition.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"--where cannot be read: {error}.", remedy=_EXAMPLE, code=E_CONDITION
        ) from error
    translation = _Translation()
    sql = translation.condition(tree.body)
    return RolloutFilter(sql, translation.parameters)


class _Translation:
    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}

    def condition(self, node: ast.expr) -> str:
        match node:
            case ast.BoolOp(op=operator, values=values):
                conjunction = " AND " if isinstance(operator, ast.And) else " OR "
                return "(" + conjunction.join(self.condition(value) for value in values) + ")"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                # NULL compares to nothing: without this, `not` would be neither true nor false.
                return f"(NOT coalesce({self.condition(operand)}, false))"
            case ast.Compare():
                return self._comparison(node)
            case _:
                _refuse(node)

    def _comparison(self, node: ast.Compare) -> str:
        parts: list[str] = []
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._pair(operator, left, right))
            left = right
        return "(" + " AND ".join(parts) + ")"

    def _pair(self, operator: ast.cmpop, left: ast.expr, right: ast.expr) -> str:
        if isinstance(operator, (ast.In, ast.NotIn)):
            found = self._membership(left, right)
            return found if isinstance(operator, ast.In) else f"(NOT coalesce({found}, false))"
        return self._compared(left, _COMPARISONS[type(operator)], right)

    def _membership(self, left: ast.expr, right: ast.expr) -> str:
        if isinstance(right, (ast.List, ast.Tuple)):
            equal = _COMPARISONS[ast.Eq]
            options = [self._compared(left, equal, item) for item in right.elts]
            return "(" + (" OR ".join(options) or "false") + ")"
        part, whole = self._term(left), self._term(right)
        if (part.kind, whole.kind) != ("text", "text"):
            _refuse(left, why="`in` looks for a text in a text, or for a value in a list.")
        return f"(strpos({whole.sql}, {part.sql}) > 0)"

    def _compared(self, left: ast.expr, operator: str, right: ast.expr) -> str:
        a, b = self._term(left), self._term(right)
        if (
            operator == _COMPARISONS[ast.Eq]
            and isinstance(right, ast.Constant)
            and b.kind != "null"
        ):
            operator = "="  # the same for a value, and indexes know it
        if a.kind != b.kind and "null" not in (a.kind, b.kind):
            why = f"`{ast.unparse(left)}` is a {a.kind} and `{ast.unparse(right)}` a {b.kind}."
            _refuse(right, why=why)
        return f"{a.sql} {operator} {b.sql}"

    def _term(self, node: ast.expr) -> _Term:
        match node:
            case ast.Name(id=name):
                return _field_named(name)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return self._bind(node, -value)
            case ast.Constant(value=None):
                return _Term("NULL", "null")
            case ast.Constant(value=bool()):
                _refuse(node)
            case ast.Constant(value=str() | int() | float() as value):
                return self._bind(node, value)
            case _:
                _refuse(node)

    def _bind(self, node: ast.expr, value: str | float) -> _Term:
        name = f"where_{len(self.parameters)}"
        if isinstance(value, str):
            if not value.isprintable():
                _refuse(node, why="A text of only printable characters is looked for.")
            self.parameters[name] = value
            return _Term(f"CAST(:{name} AS text)", "text")
        try:
            self.parameters[name] = float(value)
        except OverflowError:
            _refuse(node, why="The number is too large.")
        return _Term(f"CAST(:{name} AS double precision)", "number")


def _field_named(name: str) -> _Term:
    if name in FIELDS:
        return FIELDS[name]
    near = difflib.get_close_matches(name, FIELDS, n=1)
    raise InputError(
        f"--where knows no field {name!r}.",
        remedy=f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(FIELDS)}.",
        code=E_CONDITION,
    )


def _refuse(node: ast.expr, *, why: str = _FORM) -> NoReturn:
    raise InputError(
        f"--where may not contain `{ast.unparse(node)}`.",
        why=why,
        remedy=_EXAMPLE,
        code=E_CONDITION,
    )
