"""Run one question with a configuration file of this folder.

python examples/config/run_config.py react_calculator.json "What is 15 * 24?"
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripted_policy import open_llm

from workers.agentic_rollout import create_agentic_rollout

SCRIPT = {
    "15 * 24": ["Action: calculator(expression='15 * 24')", "Final Answer: 360"],
    "": ["Final Answer: I only know what 15 * 24 is."],
}


async def main(name: str = "react_calculator.json", question: str = "What is 15 * 24?") -> None:
    config = json.loads((Path(__file__).parent / name).read_text())
    async with open_llm(SCRIPT) as llm:
        rollout = create_agentic_rollout(config, llm_generate_func=llm)
        (trajectory,) = await rollout.run_batch([question])
    if error := trajectory.metadata.get("error"):
        sys.exit(f"The trajectory failed: {error['message']}")
    print(f"Answer: {trajectory.get_final_response()}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
