r"""A software engineering agent in Kubernetes pods, one for each task.

    python examples/k8s_swe_agent/k8s_swe_agent.py --namespace rollouts --image python:3.12

Needs the Kubernetes client (pip install 'rollout-pipeline[k8s]') and the rights of permissions.yaml
in the namespace. Without a cluster the agent works in a sandbox of this machine; without
`OPENAI_API_KEY` or `ANTHROPIC_API_KEY` the answers come from a script. Each line of tasks.jsonl is
a repository with its tests, so the same file is a dataset of the pipeline:

    rollout run tasks.jsonl --agent swe --max-tokens 4096 \
        --set 'agent_config={"sandbox": "k8s", "image": "python:3.12"}'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripted_policy import call_tool, open_llm

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.core.trajectory import Trajectory
from workers.sandbox.base import SandboxFailure
from workers.sandbox.kubernetes_pod import load_configuration

TASKS = Path(__file__).with_name("tasks.jsonl")


def write(path: str, text: str) -> dict[str, Any]:
    """Return the call that writes a file."""
    arguments = {"command": "create", "path": path, "file_text": text}
    return call_tool("file_editor", json.dumps(arguments), "call_1")


FINISH = call_tool("finish", '{"answer": "done"}', "call_2")
DISCOUNT = "def discount(price, percent):\n    return max(0, price * (100 - percent) / 100)\n"
NEWEST = "def newest(orders, n):\n    return sorted(orders, key=lambda o: -o['day'])[:n]\n"
SCRIPT = {
    "total()": [write("shop/prices.py", "def total(prices):\n    return sum(prices)\n"), FINISH],
    "discount(": [write("shop/discounts.py", DISCOUNT), FINISH],
    "newest()": [write("shop/orders.py", NEWEST), FINISH],
    "": ["Final Answer: This script only knows the tasks of tasks.jsonl."],
}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Solve tasks in Kubernetes pods.")
    kinds = ("auto", "k8s", "docker", "bubblewrap", "process")
    parser.add_argument(
        "--sandbox", choices=kinds, default="auto", help="auto: k8s if there is one"
    )
    parser.add_argument("--namespace", default="default", help="where pods are made")
    parser.add_argument("--image", default="python:3.12", help="must have git and python3")
    parser.add_argument("--tasks", type=Path, default=TASKS, help="a JSON Lines file")
    parser.add_argument("--concurrency", type=int, default=4, help="pods at one time")
    parser.add_argument("--max-steps", type=int, default=60)
    return parser.parse_args()


def choose_sandbox(wanted: str) -> str:
    """Return the kind of sandbox; `auto` is a pod if a cluster is configured."""
    if wanted != "auto":
        return wanted
    try:
        load_configuration()
    except SandboxFailure as error:
        print(f"(the tasks are worked on in a sandbox of this machine. {error})")
        return "auto"
    return "k8s"


def agent_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the agent's options: the sandbox and its image."""
    kind = choose_sandbox(arguments.sandbox)
    options: dict[str, Any] = {"sandbox": kind}
    if kind in ("k8s", "docker"):
        options |= {"image": arguments.image, "repository_path": "/workspace"}
    if kind == "k8s":
        options["sandbox_options"] = {"namespace": arguments.namespace}
    return options


def show(task: dict[str, Any], trajectory: Trajectory) -> bool:
    """Print the result of a task; return False if it ended in an error."""
    name = task.get("id", trajectory.request_id)
    if error := trajectory.metadata.get("error"):
        print(f"{name}: error: {error['message']}")
        return False
    changed = [line for line in trajectory.get_final_response().splitlines() if line[:3] in _MARKS]
    print(f"{name}: reward {trajectory.final_reward}, {len(trajectory.get_tool_calls())} calls")
    print("".join(f"  {line}\n" for line in changed), end="")
    return True


_MARKS = ("---", "+++")


async def main(arguments: argparse.Namespace) -> int:
    tasks = [json.loads(line) for line in arguments.tasks.read_text().splitlines()]
    config = AgenticRolloutConfig(
        agent_type="swe",
        agent_config=agent_options(arguments),
        max_steps=arguments.max_steps,
        max_tokens_per_step=4096,
        concurrent_requests=arguments.concurrency,
    )
    async with open_llm(SCRIPT) as llm:
        trajectories = await AgenticRollout(config, llm).run_batch(tasks)
    worked = [show(task, each) for task, each in zip(tasks, trajectories, strict=True)]
    rewards = [each.final_reward for each in trajectories if each.final_reward is not None]
    print(f"{sum(rewards):g} of {len(tasks)} solved")
    return 0 if all(worked) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read_arguments())))
