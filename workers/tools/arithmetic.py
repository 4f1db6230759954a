"""Arithmetic expressions and named operations of numbers, for the `calculator` tool.

`simpleeval` evaluates an expression; operations with large results are refused here before they are
computed. Must not: evaluate text, attributes or names.
"""

from __future__ import annotations

import ast
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from simpleeval import InvalidExpression, SimpleEval

MAX_EXPRESSION_CHARS = 2000
MAX_RESULT_BITS = 13_000  # below the size at which Python refuses to write an int as text
MAX_FACTORIAL = 1000

Number = int | float


class CalculationError(ValueError):
    """A calculation that is impossible or refused; the message is for the model."""


def _bounded(value: Any) -> Any:
    """Return a real number of bounded size."""
    if isinstance(value, complex):
        raise CalculationError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_RESULT_BITS:
        raise CalculationError("the number is too large")
    return value


def _check_bits(bits: float) -> None:
    if bits > MAX_RESULT_BITS:
        raise CalculationError("the number is too large")


def _multiply(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        _check_bits(a.bit_length() + b.bit_length())
    return a * b


def _power(base: Number, exp: Number) -> Number:
    if isinstance(base, int) and isinstance(exp, int) and exp > 0 and abs(base) > 1:
        _check_bits(base.bit_length() * exp)
    if base == 0 and exp < 0:
        raise ZeroDivisionError
    return _bounded(base**exp)


def _log(x: Number, base: Number = math.e) -> Number:
    return math.log(x) if base == math.e else math.log(x, base)


def _factorial(n: Number) -> int:
    return math.factorial(_small_whole(n, "factorial"))


def _comb(n: Number, k: Number) -> int:
    return math.comb(_small_whole(n, "comb"), _whole(k))


def _perm(n: Number, k: Number) -> int:
    return math.perm(_small_whole(n, "perm"), _whole(k))


def _round(number: Number, ndigits: Number = 0) -> Number:
    places = _whole(ndigits)
    if abs(places) > 300:
        raise CalculationError("round takes at most 300 digits")
    return round(number, places) if places else round(number)


def _whole(value: Number) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise CalculationError(f"{value} is not a whole number")
    return int(value)


def _small_whole(value: Number, function: str) -> int:
    whole = _whole(value)
    if not 0 <= whole <= MAX_FACTORIAL:
        raise CalculationError(f"{function} takes whole numbers from 0 to {MAX_FACTORIAL}")
    return whole


def _over_list(function: Callable[[Sequence[Number]], Number]) -> Callable[..., Number]:
    """Return the function of a list as one that also takes several numbers."""

    def call(*numbers: Any) -> Number:
        values = numbers[0] if len(numbers) == 1 and isinstance(numbers[0], list) else numbers
        if not values or any(isinstance(value, list) for value in values):
            raise CalculationError("it takes one or more numbers")
        return function(values)

    return call


def _over_whole(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *numbers: _bounded(function(*map(_whole, numbers)))


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OF_MATH = ("sqrt", "cbrt", "exp", "log2", "log10", "floor", "ceil", "trunc", "fabs")
_OF_MATH += ("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh")
_OF_MATH += ("hypot", "degrees", "radians")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in _OF_MATH},
    "log": _log,
    "ln": math.log,
    "abs": abs,
    "round": _round,
    "pow": _power,
    "factorial": _factorial,
    "comb": _comb,
    "perm": _perm,
    "gcd": _over_whole(math.gcd),
    "lcm": _over_whole(math.lcm),
    "int": int,
    "float": float,
    "min": _over_list(min),
    "max": _over_list(max),
    "sum": _over_list(sum),
    "mean": _over_list(statistics.fmean),
    "median": _over_list(statistics.median),
    "product": _over_list(lambda numbers: reduce(_multiply, numbers)),
}
_NAMES = {"pi": math.pi, "e": math.e, "tau": math.tau, "True": True, "False": False}
_NODES = (
    ast.Name,
    ast.UnaryOp,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Call,
    ast.keyword,
)
_ARITHMETIC: dict[str, Callable[..., Number]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": _multiply,
    "divide": operator.truediv,
    "modulo": operator.mod,
    "power": _power,
}
_OF_MANY = ("sum", "product", "min", "max", "mean", "median", "gcd", "lcm")
_OF_ONE = ("sqrt", "cbrt", "factorial", "abs", "floor", "ceil", "round", "exp", "log", "log2")
_OF_ONE += ("log10", "ln", "sin", "cos", "tan", "asin", "acos", "atan", "degrees", "radians")
OPERATIONS = [*_ARITHMETIC, *_OF_MANY, *_OF_ONE]


class Evaluator(SimpleEval):
    """`SimpleEval` reduced to numbers, with lists of them as arguments."""

    def __init__(self) -> None:
        super().__init__(operators=_OPERATORS, functions=FUNCTIONS, names=_NAMES)
        self.nodes: dict[type[ast.AST], Callable[..., Any]] = {
            **{kind: self.nodes[kind] for kind in _NODES},
            ast.Constant: self._number,
            ast.List: self._list,
            ast.Tuple: self._list,
        }

    def compute(self, parameters: Mapping[str, Any]) -> Any:
        """Return the result of the `expression`, or of the `operation` and its numbers.

        Raises:
            CalculationError: The calculation is impossible, or the result too large.
        """
        try:
            if expression := parameters.get("expression"):
                return _bounded(self._evaluate(expression))
            if operation := parameters.get("operation"):
                return _bounded(_operate(operation, parameters))
        except CalculationError:
            raise
        except ZeroDivisionError:
            raise CalculationError("division by zero") from None
        except (OverflowError, RecursionError):
            raise CalculationError("the number is too large, or the expression too deep") from None
        except (ValueError, TypeError, ArithmeticError, InvalidExpression) as error:
            raise CalculationError(f"cannot calculate this: {error}") from None
        raise CalculationError("give an expression, or an operation and its numbers")

    def _evaluate(self, expression: str) -> Any:
        if len(expression) > MAX_EXPRESSION_CHARS:
            raise CalculationError(
                f"the expression is longer than {MAX_EXPRESSION_CHARS} characters"
            )
        try:
            tree = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, MemoryError, ValueError):  # ValueError: surrogates, and a null byte
            raise CalculationError(
                f"{expression[:80]!r} is not an expression; write for example '2 * (3 + 4) ** 2'"
            ) from None
        return self.eval(expression, tree)

    def _eval_binop(self, node: ast.BinOp) -> Any:
        if isinstance(node.op, ast.BitXor):
            raise CalculationError("'^' is not a power here: write ** instead")
        if type(node.op) not in self.operators:
            raise CalculationError(f"the operator {type(node.op).__name__} is not available")
        left, right = self._eval(node.left), self._eval(node.right)
        # Lists are arguments only: Python would multiply one into a billion elements.
        if isinstance(left, int | float) and isinstance(right, int | float):
            return _bounded(self.operators[type(node.op)](left, right))
        raise CalculationError("both sides of an operator must be numbers")

    def _eval_call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name) or node.func.id not in self.functions:
            name = node.func.id if isinstance(node.func, ast.Name) else "such a call"
            known = ", ".join(self.functions)
            raise CalculationError(f"the function {name} is not available; known: {known}")
        return super()._eval_call(node)

    def _number(self, node: ast.Constant) -> Number:
        if not isinstance(node.value, int | float):
            raise CalculationError(f"{str(node.value)[:40]!r} is not a number")
        return _bounded(node.value)

    def _list(self, node: ast.List | ast.Tuple) -> list[Any]:
        return [self._eval(item) for item in node.elts]


def _operate(operation: str, parameters: Mapping[str, Any]) -> Any:
    numbers = list(parameters.get("numbers") or ())
    numbers = numbers or [parameters[key] for key in ("a", "b", "n") if key in parameters]
    if not numbers:
        raise CalculationError(f"{operation} needs 'numbers', 'a' and 'b', or 'n'")
    if operation in _ARITHMETIC:
        if len(numbers) < 2:
            raise CalculationError(f"{operation} needs two numbers: 'a' and 'b', or 'numbers'")
        return reduce(lambda a, b: _bounded(_ARITHMETIC[operation](a, b)), numbers)
    if operation in _OF_MANY:
        return FUNCTIONS[operation](*numbers)
    if len(numbers) != 1:
        raise CalculationError(f"{operation} needs one number: 'n'")
    return FUNCTIONS[operation](numbers[0])
