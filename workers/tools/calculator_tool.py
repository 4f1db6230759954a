"""The `calculator` tool: arithmetic and functions of numbers, in microseconds, in the event loop.

Used by name through the tool registry. `simpleeval` evaluates the expression; operations with large
results are refused here before they are computed. Must not: evaluate text, attributes or names.
"""

from __future__ import annotations

import ast
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

from simpleeval import InvalidExpression, SimpleEval

from workers.core.base_tool import BaseAgenticTool
from workers.core.options import Options
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema, result_text

MAX_EXPRESSION_CHARS = 2000
MAX_RESULT_BITS = 13_000  # below the size at which Python refuses to write an int as text
MAX_FACTORIAL = 1000
DEFAULT_PRECISION = 10

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
    whole = _whole(n)
    if not 0 <= whole <= MAX_FACTORIAL:
        raise CalculationError(f"factorial takes whole numbers from 0 to {MAX_FACTORIAL}")
    return math.factorial(whole)


def _choose(n: Number, k: Number) -> int:
    if not 0 <= _whole(n) <= MAX_FACTORIAL:
        raise CalculationError(f"comb takes whole numbers from 0 to {MAX_FACTORIAL}")
    return math.comb(_whole(n), _whole(k))


def _permute(n: Number, k: Number) -> int:
    if not 0 <= _whole(n) <= MAX_FACTORIAL:
        raise CalculationError(f"perm takes whole numbers from 0 to {MAX_FACTORIAL}")
    return math.perm(_whole(n), _whole(k))


def _round(number: Number, ndigits: Number = 0) -> Number:
    places = _whole(ndigits)
    if abs(places) > 300:
        raise CalculationError("round takes at most 300 digits")
    return round(number, places) if places else round(number)


def _whole(value: Number) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise CalculationError(f"{value} is not a whole number")
    return int(value)


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


def _product(numbers: Sequence[Number]) -> Number:
    return reduce(_multiply, numbers)


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
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in _OF_MATH},
    "log": _log,
    "ln": math.log,
    "abs": abs,
    "round": _round,
    "pow": _power,
    "factorial": _factorial,
    "comb": _choose,
    "perm": _permute,
    "gcd": _over_whole(math.gcd),
    "lcm": _over_whole(math.lcm),
    "int": int,
    "float": float,
    "min": _over_list(min),
    "max": _over_list(max),
    "sum": _over_list(sum),
    "mean": _over_list(statistics.fmean),
    "median": _over_list(statistics.median),
    "product": _over_list(_product),
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
    ast.Constant,
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

_SCHEMA = create_openai_tool_schema(
    "calculator",
    "Calculate. Give an expression such as 'sqrt(144) * 2 ** 3', or an operation and its numbers.",
    {
        "expression": {
            "type": "string",
            "description": (
                "Numbers, + - * / // % ** ( ), comparisons, pi, e, and the functions "
                + ", ".join(_FUNCTIONS)
            ),
        },
        "operation": {
            "type": "string",
            "enum": [*_ARITHMETIC, *_OF_MANY, *_OF_ONE],
            "description": "Instead of an expression, with 'numbers', 'a' and 'b', or 'n'.",
        },
        "numbers": {"type": "array", "items": {"type": "number"}},
        "a": {"type": "number"},
        "b": {"type": "number"},
        "n": {"type": "number"},
    },
)


class CalculatorTool(BaseAgenticTool):
    """Calculates an expression or a named operation.

    Args:
        config: `precision` (10): digits of a result after the decimal point; for results below 1
            the significant digits.

    Raises:
        ValueError: `precision` is no whole number from 0 to 15.
    """

    options: ClassVar[Options] = {"precision": int}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, _SCHEMA)
        precision = self.config.get("precision", DEFAULT_PRECISION)
        if isinstance(precision, bool) or precision not in range(16):
            raise ValueError(f"precision is {precision!r}; it must be a whole number from 0 to 15")
        self.precision = int(precision)
        self._evaluator = _Evaluator()

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Calculate: `{"result": 12, "expression": "sqrt(144)"}`, or a failure with the reason."""
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        try:
            value = self.calculate(parameters)
        except CalculationError as error:
            return ToolResult(success=False, error=str(error))
        asked = {key: parameters[key] for key in ("expression", "operation") if key in parameters}
        return ToolResult(success=True, result={"result": value, **asked}, shown=result_text(value))

    def calculate(self, parameters: Mapping[str, Any]) -> Number:
        """Return the result of the parameters, rounded to the precision.

        Raises:
            CalculationError: The calculation is impossible, or the result too large.
        """
        try:
            if expression := parameters.get("expression"):
                value = self._evaluator.evaluate(expression)
            elif operation := parameters.get("operation"):
                value = _operate(operation, parameters)
            else:
                raise CalculationError("give an expression, or an operation and its numbers")
            return self._rounded(_bounded(value))
        except CalculationError:
            raise
        except ZeroDivisionError:
            raise CalculationError("division by zero") from None
        except (OverflowError, RecursionError):
            raise CalculationError("the number is too large, or the expression too deep") from None
        except (ValueError, TypeError, ArithmeticError, InvalidExpression) as error:
            raise CalculationError(f"cannot calculate this: {error}") from None

    def _rounded(self, value: Any) -> Number:
        if isinstance(value, bool | int):
            return value
        if not isinstance(value, float):
            raise CalculationError("the result is not a number")
        if not math.isfinite(value):
            raise CalculationError("the result is not a finite number")
        if abs(value) < 1:
            value = float(f"{value:.{max(self.precision, 1)}g}")
        else:
            value = round(value, self.precision)
        return int(value) if value.is_integer() and abs(value) < 1e15 else value


class _Evaluator(SimpleEval):
    """`SimpleEval` reduced to numbers, with lists of them as arguments."""

    def __init__(self) -> None:
        super().__init__(operators=_OPERATORS, functions=_FUNCTIONS, names=_NAMES)
        kept: dict[type[ast.AST], Callable[..., Any]] = {kind: self.nodes[kind] for kind in _NODES}
        own = {ast.Constant: self._number, ast.List: self._list, ast.Tuple: self._list}
        self.nodes = {**kept, **own}

    def evaluate(self, expression: str) -> Any:
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
        return _FUNCTIONS[operation](*numbers)
    if len(numbers) != 1:
        raise CalculationError(f"{operation} needs one number: 'n'")
    return _FUNCTIONS[operation](numbers[0])
