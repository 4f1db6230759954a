"""Check that rewards are not invented, arguments not executed, calculations not endless.

    python examples/validation_tests.py

The answers always come from a script; exit code 1 if a check fails.
"""

from __future__ import annotations

import sys
import time

from scripted_policy import ScriptedPolicy
from test_agentic_rollout import run

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
from workers.core.call_parser import CallParseError, parse_call
from workers.core.registry import list_agents
from workers.core.tool_registry import get_global_tool_registry


async def a_failed_model_call_is_never_a_reward() -> bool:
    async def away(messages, **options):
        raise ConnectionError("the endpoint is away")

    (trajectory,) = await AgenticRollout(AgenticRolloutConfig(), away).run_batch(["q"])
    return (
        not trajectory.is_completed
        and trajectory.final_reward is None
        and trajectory.metadata["error"]["type"] == "ConnectionError"
    )


async def arguments_are_read_and_never_executed() -> bool:
    try:
        parse_call("f(a=__import__('os').getcwd())")
    except CallParseError:
        return parse_call("f(a='1, 2', b=[3])").args == {"a": "1, 2", "b": [3]}
    return False


async def the_calculator_refuses_endless_calculations() -> bool:
    calculator = get_global_tool_registry().get_tool("calculator")
    started = time.perf_counter()
    results = [
        await calculator.execute_tool("i", {"expression": text})
        for text in ("9**9**9", "'a' * 10**9", "().__class__", "factorial(10**9)")
    ]
    return not any(result.success for result in results) and time.perf_counter() - started < 1


async def the_model_gets_the_error_of_a_tool() -> bool:
    llm = ScriptedPolicy({"": ["Action: calculator(expression='1/0')", "Final Answer: no"]})
    rollout = AgenticRollout(AgenticRolloutConfig(tools_config=["calculator"]), llm)
    (trajectory,) = await rollout.run_batch(["q"])
    result = trajectory.get_messages()[-2]["content"]
    errors = trajectory.metadata["tools"]["calculator"]["errors"]
    return "division by zero" in result and errors == 1


async def unknown_names_are_refused_with_the_known_ones() -> bool:
    refused = 0
    for settings in ({"agent_type": "x"}, {"tools_config": ["x"]}, {"max_stepss": 3}):
        try:
            create_agentic_rollout(settings)
        except ValueError as error:
            refused += "nown" in str(error)
    return refused == 3 and {"react", "tool", "coding", "swe"} <= set(list_agents())


CHECKS = (
    a_failed_model_call_is_never_a_reward,
    arguments_are_read_and_never_executed,
    the_calculator_refuses_endless_calculations,
    the_model_gets_the_error_of_a_tool,
    unknown_names_are_refused_with_the_known_ones,
)

if __name__ == "__main__":
    sys.exit(1 if run(CHECKS) else 0)
