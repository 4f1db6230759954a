"""Browse stored trajectories: list, get, filter, statistics, export.

    python examples/trajectory_client/browse.py                       # offline, on a small run
    python examples/trajectory_client/browse.py list RUN
    python examples/trajectory_client/browse.py get RUN-g000000-r0
    python examples/trajectory_client/browse.py filter RUN --state failed
    python examples/trajectory_client/browse.py statistics RUN
    python examples/trajectory_client/browse.py export RUN -o good.jsonl --min-reward 1

With a command the script reads the store of `ROLLOUT_DATABASE__URL`, or that of `.rollout` in this
folder. Without a command it makes a temporary store with a run of 4 prompts and 3 rollouts of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from trajectory_client import Line, StoredTrajectory, TrajectoryClient

from pipeline.contract.errors import PipelineError


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Look at stored trajectories.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("runs", help="the latest runs")
    for name, what in (
        ("list", "finished rollouts"),
        ("filter", "those for which the options hold"),
        ("statistics", "a run's figures"),
        ("export", "a file of them"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("run")
        if name in ("filter", "export"):
            command.add_argument("--state", choices=("succeeded", "failed", "cancelled"))
            command.add_argument("--stop-reason")
            command.add_argument("--min-reward", type=float)
            command.add_argument("--max-reward", type=float)
            command.add_argument("--text", help="in the conversation")
        if name == "list":
            command.add_argument("--limit", type=int, default=20)
        if name == "export":
            command.add_argument("-o", "--output", type=Path, required=True)
            command.add_argument("--to", choices=("jsonl", "parquet"), default="jsonl")
    commands.add_parser("get", help="one trajectory").add_argument("label")
    return parser.parse_args()


def holds(arguments: argparse.Namespace, line: Line) -> bool:
    """Say whether the options hold for a rollout; one without a reward has none to compare."""
    reward, least, most = line["reward"], arguments.min_reward, arguments.max_reward
    return (
        arguments.state in (None, line["state"])
        and arguments.stop_reason in (None, line["stop_reason"])
        and (least is None or (reward is not None and reward >= least))
        and (most is None or (reward is not None and reward <= most))
        and (arguments.text is None or arguments.text in json.dumps(line["messages"]))
    )


def show_line(line: Line) -> None:
    answer = str(line["messages"][-1]["content"]).splitlines()[-1] if line["messages"] else ""
    result = line["error"]["class"] if line["error"] else f"reward {line['reward']:g}"
    print(f"  {line['label']}  {line['state']:9}  {result:17}  {answer}")


def show_trajectory(found: StoredTrajectory) -> None:
    rollout, trajectory = found.rollout, found.trajectory
    print(f"  {rollout['label']}: {rollout['state']}, {len(rollout['attempts'])} attempt(s)")
    for step in trajectory.steps if trajectory else ():
        print(f"    {step.step_type.value:13} {step.content}")
    for attempt in rollout["attempts"]:
        if attempt["error"]:
            print(f"    error         {attempt['error']['class']}: {attempt['error']['message']}")


def show_document(document: Any) -> None:
    print("  " + json.dumps(document, indent=2).replace("\n", "\n  "))


def carry_out(client: TrajectoryClient, arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "runs":
            for run in client.runs():
                print(f"  {run['run']}: {run['state']}, {run['rollouts']['total']} rollouts")
        case "list":
            for line in client.list(arguments.run, limit=arguments.limit):
                show_line(line)
        case "get":
            show_trajectory(client.get(arguments.label))
        case "filter":
            for line in client.filter(arguments.run, lambda line: holds(arguments, line)):
                show_line(line)
        case "statistics":
            show_document(client.statistics(arguments.run))
        case "export":
            written = client.export(
                arguments.run,
                arguments.output,
                to=arguments.to,
                condition=lambda line: holds(arguments, line),
            )
            print(f"  {written} rollouts in {arguments.output}")


def look_around(client: TrajectoryClient, run: str) -> None:
    """Use every function once."""
    print("runs")
    for each in client.runs():
        print(f"  {each['run']}: {each['state']}, {each['rollouts']['total']} rollouts")
    print("list")
    for line in client.list(run):
        show_line(line)
    print("get")
    show_trajectory(client.get(f"{run}-g000000-r0"))
    print("filter: failed")
    for line in client.filter(run, lambda line: line["state"] == "failed"):
        show_line(line)
        show_trajectory(client.get(line["label"]))
    print("statistics")
    show_document(client.statistics(run))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good.jsonl"
        n = client.export(run, path, condition=lambda line: line["reward"] == 1.0)
        print(f"export: {n} rollouts with reward 1, {path.stat().st_size} bytes")


def main() -> int:
    arguments = read_arguments()
    try:
        if arguments.command is None:
            from tiny_run import RUN, tiny_store

            print("(no command: this is a run of its own, in a store that is removed at the end)")
            with tiny_store() as settings, TrajectoryClient.connect(settings) as client:
                look_around(client, RUN)
        else:
            with TrajectoryClient.connect() as client:
                carry_out(client, arguments)
    except PipelineError as error:
        print(f"{error} {error.remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
