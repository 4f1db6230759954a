"""Finds an arithmetic expression in a question and computes it, for the offline policy.

Only + - * / and parentheses, square roots, and exact results. Must not: evaluate Python, raise
another error than `ArithmeticFailure`, or take more than linear time.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from math import isqrt

_MAX_EXPRESSION_CHARS = 300
_WORDS = (
    (re.compile(r"\bmultiplied by\b|\btimes\b|[×·]"), "*"),
    (re.compile(r"\bdivided by\b|÷"), "/"),
    (re.compile(r"\bplus\b"), "+"),
    (re.compile(r"\bminus\b|−"), "-"),
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ROOT = re.compile(r"square root of (\d+(?:\.\d+)?)", re.IGNORECASE)
_RUN = re.compile(r"[-+(\d][-+*/().\d\s]*[\d)]")
_OPERATION = re.compile(r"[\d)]\s*[-+*/]\s*[-+(\d]")


class ArithmeticFailure(ValueError):
    """The expression cannot be computed."""


def find_expression(question: str) -> str | None:
    """Return the longest expression in the text, written for a calculator; None if there is none.

    `What is 12 * (3 + 4)?` gives `12 * (3 + 4)`.
    """
    root = _ROOT.search(question)
    if root and is_computable(f"sqrt({root[1]})"):
        return f"sqrt({root[1]})"
    text = _THOUSANDS.sub("", question)
    for pattern, operator in _WORDS:
        text = pattern.sub(operator, text)
    runs = [" ".join(match[0].split()) for match in _RUN.finditer(text)]
    for run in sorted(runs, key=len, reverse=True):
        if _OPERATION.search(run) and is_computable(run):
            return run
    return None


def is_computable(expression: str) -> bool:
    """Say whether `compute` has a result for the expression."""
    try:
        compute(expression)
    except ArithmeticFailure:
        return False
    return True


def compute(expression: str) -> Fraction:
    """Compute an expression exactly.

    Raises:
        ArithmeticFailure: The text is no such expression or too long, or it divides by zero.
    """
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise ArithmeticFailure("expression is too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ArithmeticFailure(str(error)) from None


def write_number(value: Fraction) -> str:
    """Write a number as a person would: an integer, or at most ten decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
        case ast.Call(func=ast.Name(id="sqrt"), args=[operand], keywords=[]):
            return _root(_value(operand))
    raise ValueError("not an arithmetic expression")


def _root(value: Fraction) -> Fraction:
    top, bottom = value.numerator, value.denominator
    if value < 0 or isqrt(top) ** 2 != top or isqrt(bottom) ** 2 != bottom:
        raise ValueError("no exact square root")
    return Fraction(isqrt(top), isqrt(bottom))
