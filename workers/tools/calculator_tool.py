"""The `calculator` tool: arithmetic and functions of numbers, in microseconds, in the event loop.

Used by name through the tool registry. `arithmetic` computes; the tool rounds the result. Must not:
raise for any parameters of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from workers.core.base_tool import BaseAgenticTool
from workers.core.options import Options
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema, result_text
from workers.tools.arithmetic import FUNCTIONS, OPERATIONS, CalculationError, Evaluator, Number

DEFAULT_PRECISION = 10

_SCHEMA = create_openai_tool_schema(
    "calculator",
    "Calculate. Give an expression such as 'sqrt(144) * 2 ** 3', or an operation and its numbers.",
    {
        "expression": {
            "type": "string",
            "description": (
                "Numbers, + - * / // % ** ( ), comparisons, pi, e, and the functions "
                + ", ".join(FUNCTIONS)
            ),
        },
        "operation": {
            "type": "string",
            "enum": OPERATIONS,
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
        self._evaluator = Evaluator()

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Calculate: `{"result": 12, "expression": "sqrt(144)"}`, or a failure with the reason."""
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        try:
            value = self._rounded(self._evaluator.compute(parameters))
        except CalculationError as error:
            return ToolResult(success=False, error=str(error))
        query = {key: parameters[key] for key in ("expression", "operation") if key in parameters}
        return ToolResult(success=True, result={"result": value, **query}, shown=result_text(value))

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
