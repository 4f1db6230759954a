"""Train a small language model by GRPO through the whole pipeline, and kill processes on the way.

    python examples/train_tiny_policy.py

A transformer of 107,288 parameters learns to use a calculator in two turns. Its server is
OpenAI-compatible, its agent a plug-in of the worker, its trainer a client of the pipeline, and its
arithmetic numpy alone. Queue, store, controller, worker, policy server and trainer are processes of
their own on this machine, which are removed at the end. The worker is killed once and the trainer
twice with SIGKILL; `--no-kills` leaves them alone.

With equal seeds the curve of rewards is the same, with and without kills. The parts are in
`tiny_policy/`: begin with `trainer.py`, which is what connects a trainer of your own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tiny_policy.checkpoint import Checkpoint
from tiny_policy.machine import Machine, Report, started_machine, wait_until
from tiny_policy.runs import GROUPS, ROLLOUTS, RUN, enqueue_problems
from tiny_policy.task import problems

from pipeline.store.status import RunStatus, run_status
from rollout.progress import wait_for_run

STEPS = 25
#: What `--check` asks for: the rise from the first five steps to the last five, and the accuracy.
LEAST_GAIN, LEAST_GREEDY = 0.25, 0.75
#: Problems of a greedy evaluation; the same ones before and after.
_EVALUATED = 128
_EVALUATION_SEED = 1_000_003
_WAIT_S = 120.0


class Kills:
    """Decides when processes are killed: at a quarter, a half and three quarters of the steps."""

    def __init__(self, machine: Machine, steps: int, *, enabled: bool) -> None:
        self._machine = machine
        self._worker_step = max(1, steps // 4)
        self._trainer_kills = {(steps // 2, "pulled"), (3 * steps // 4, "checkpointed")}
        self._enabled = enabled
        self.done: list[dict[str, Any]] = []

    def of_trainer(self, report: Report) -> bool:
        """Say whether the trainer is killed after this report; each kill happens once."""
        moment = (report["step"], report["event"])
        if not self._enabled or moment not in self._trainer_kills:
            return False
        self._trainer_kills.remove(moment)
        self.done.append({"process": "trainer", **report})
        return True

    def of_worker(self, report: Report) -> None:
        """Kill the worker in its step, when rollouts wait for the model.

        The policy server is held for that moment: the rollouts of a step would be done too soon.
        """
        moment = (report["step"] + 1, report["event"])
        if not self._enabled or moment != (self._worker_step, "committed"):
            return
        with self._machine.held_policy():
            wait_until(
                lambda: _status(self._machine, RUN).rollouts["running"] > 0,
                timeout_s=_WAIT_S,
                what="a running rollout",
            )
            self._machine.replace_worker()
        self.done.append({"process": "worker", "step": self._worker_step})


def train(machine: Machine, options: argparse.Namespace, *, started: float) -> dict[str, Any]:
    """Evaluate, train, evaluate again; return the figures."""
    policy_url = machine.start_policy_server()
    greedy_before = _evaluate(machine, "greedy-before", policy_url)
    _say(f"greedy before: {greedy_before:.2f}")

    kills = Kills(machine, options.steps, enabled=not options.no_kills)
    arguments = [str(machine.checkpoint), "--policy-url", policy_url]
    arguments += ["--steps", str(options.steps), "--seed", str(options.seed)]
    for report in machine.run_trainer(arguments, is_fatal=kills.of_trainer):
        kills.of_worker(report)
        _show(report)
    greedy_after = _evaluate(machine, "greedy-after", policy_url)

    history = Checkpoint.load(machine.checkpoint).history
    rewards = [step.mean_reward for step in history]
    trained = Counter(group for step in history for group in step.group_ids)
    status = _status(machine, RUN)
    result = {
        "greedy_before": round(greedy_before, 4),
        "greedy_after": round(greedy_after, 4),
        "mean_first5": round(float(np.mean(rewards[:5])), 4),
        "mean_last5": round(float(np.mean(rewards[-5:])), 4),
        "steps": len(history),
        "seconds": round(time.monotonic() - started, 1),
        "rollouts_lost": options.steps * GROUPS * ROLLOUTS - sum(_ended(status)),
        "groups_twice": sum(n > 1 for n in trained.values()),
    }
    if options.save:
        more = {"rewards": rewards, "seed": options.seed, "kills": kills.done}
        more |= {"groups": status.groups, "trained_groups": len(trained)}
        more |= {"attempts": status.attempts}
        with options.save.open("a") as file:
            file.write(json.dumps(result | more) + "\n")
    return result


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Say what the figures lack of a proof that the pipeline trains."""
    gained = result["mean_last5"] - result["mean_first5"]
    checks = {
        f"the mean reward rose by {gained:.2f}, not {LEAST_GAIN}": gained >= LEAST_GAIN,
        f"greedy accuracy is below {LEAST_GREEDY}": result["greedy_after"] >= LEAST_GREEDY,
        f"{result['rollouts_lost']} rollouts are lost": result["rollouts_lost"] == 0,
        f"{result['groups_twice']} groups were trained twice": result["groups_twice"] == 0,
    }
    return [problem for problem, holds in checks.items() if not holds]


def _evaluate(machine: Machine, run: str, policy_url: str) -> float:
    """Return the share of problems that the current policy solves without sampling."""
    chosen = problems(np.random.default_rng(_EVALUATION_SEED), _EVALUATED)
    report = enqueue_problems(
        machine.deployment.engine, run, chosen, model_url=policy_url, seed=0, greedy=True
    )
    status = wait_for_run(machine.deployment, report.run, check=machine.check, timeout_s=_WAIT_S)
    if status.reward_mean is None or status.reward_n != _EVALUATED:
        raise RuntimeError(
            f"{status.reward_n} of {_EVALUATED} problems were scored: {status.errors}"
        )
    return status.reward_mean


def _status(machine: Machine, run: str) -> RunStatus:
    found = machine.deployment.find_run(run)
    return machine.deployment.transact(lambda connection: run_status(connection, found))


def _ended(status: RunStatus) -> list[int]:
    return [status.rollouts[state] for state in ("succeeded", "failed", "cancelled")]


def _show(report: Report) -> None:
    if report["event"] == "committed":
        _say(f"step {report['step']:2}: mean reward {report['mean_reward']:.2f}")
    elif report.get("replayed"):
        _say(f"step {report['step']:2}: pulled again after the kill, with the same groups")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Train as the options say, and print the figures."""
    parser = argparse.ArgumentParser(description="Train a tiny language model by GRPO.")
    parser.add_argument("--seed", type=int, default=0, help="of weights, problems and sampling")
    parser.add_argument("--steps", type=int, default=STEPS, help="trainer steps")
    parser.add_argument("--no-kills", action="store_true", help="kill no process on the way")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--save", type=Path, help="append the figures and the curve to this file")
    parser.add_argument("--check", action="store_true", help="fail unless the policy learned")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    with started_machine(seed=options.seed) as machine:
        result = train(machine, options, started=started)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:>14}  {value}" for name, value in result.items()))
    if options.check and (found := shortfalls(result)):
        sys.exit(f"The proof failed: {'; '.join(found)}.")


if __name__ == "__main__":
    main()
