"""A ReAct agent on Claude that uses a calculator by native tool calls.

    export ANTHROPIC_API_KEY="your-key"
    python examples/claude_integration/simple_claude_example.py

Without a key the answers come from a script.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripted_policy import ScriptedPolicy, call_tool

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig

QUESTION = "A crate holds 144 bottles. How many are in 17 crates, and what is the root of 144?"
SCRIPT = {
    "crate": [
        call_tool("calculator", '{"expression": "17 * 144"}', "call_1"),
        call_tool("calculator", '{"expression": "sqrt(144)"}', "call_2"),
        "Final Answer: 2448 bottles; the root is 12.",
    ]
}


async def main() -> None:
    config = AgenticRolloutConfig(
        agent_type="react",
        tools_config={"calculator": {}},
        agent_config={"native_tools": True},
        max_tokens_per_step=1024,
    )
    if os.environ.get("ANTHROPIC_API_KEY"):
        from claude_llm_client import ClaudeAPIClient

        from workers.llm.connections import close_connections

        llm = ClaudeAPIClient()
        print(f"(answers come from {llm.base_url}, model {llm.model})")
    else:
        llm, close_connections = ScriptedPolicy(SCRIPT), None
        print("(no ANTHROPIC_API_KEY: answers come from a script)")
    rollout = AgenticRollout(config, llm)
    trajectory = await rollout.agent.run_trajectory({"content": QUESTION}, llm, "claude")
    for step in trajectory.steps:
        print(f"  {step.step_type.value:13} {step.content}")
    print(f"Answer: {trajectory.get_final_response()}")
    if close_connections is not None:
        await close_connections()


if __name__ == "__main__":
    asyncio.run(main())
