"""The long form of the fault suite: one deployment, every fault, thousands of rollouts, a table.

`python -m benchmarks faults` runs it. The seed determines the order of faults and all random
choices, but not their timing. Must not: hide a violation.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from benchmarks.faults import controller, injections, trainer, worker
from benchmarks.faults.deployment import Deployment, Size
from benchmarks.faults.figures import count_figures
from benchmarks.faults.invariants import find_early_calls, find_violations
from benchmarks.faults.results import (
    CALM,
    DRAIN,
    HARM,
    KILL,
    LIMITED,
    STORM,
    TWICE,
    TWICE_STORED,
    Campaign,
    Phase,
)
from benchmarks.faults.runs import GROUP_SIZE, FaultRun
from benchmarks.faults.trainer_lives import TrainerLives
from benchmarks.mock_behaviour import MockBehaviour
from pipeline.limits.settings import LimitSettings
from pipeline.limits.store import LimitStore
from pipeline.settings import LeaseSettings

#: A fifth of production's. Shorter leases expire while workers start hundreds of rollouts at once.
_LEASE = LeaseSettings(heartbeat_s=1.0, lease_s=6.0, grace_s=3.0, poll_s=0.25)

#: Three workers with 200 concurrent attempts each, and rollouts that last for seconds.
BIG = Size(
    workers=3,
    concurrency=200,
    controllers=2,
    max_in_flight=600,
    lease=_LEASE,
    model=MockBehaviour(latency_ms=2000, sigma=0.5, error_rate=0.04, retry_after_s=0.5),
    model_timeout_s=30.0,
)
DRAINED_IN_FLIGHT = 500
LIMIT_PER_S, LIMIT_BURST = 100, 50

#: Leases as in production; rollouts take a second, so that recovery is mainly the lease.
REAL_LEASE = Size(model_timeout_s=30.0, lease=LeaseSettings())
#: Longest recovery from a killed worker, beyond the lease.
PROMISED_S = 5.0
#: The same on SQS, where a margin takes the place of the order of messages.
PROMISED_SQS_S = 10.0

_PATIENCE_S = 900.0
_LIMIT_LEARNED_S = 2.5


def run_campaign(
    *,
    broker: str,
    rollouts: int = 5000,
    seed: int = 1,
    size: Size = BIG,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Campaign:
    """Run every fault on a separate deployment and check the invariants.

    Args:
        broker: `redis`, `rabbitmq` or `sqs`.
        rollouts: Rollouts of the phase with most of the faults; the others are smaller.
        seed: Seed of all random choices.
        size: Size of the deployment.
        log: Called with lines of progress.

    Raises:
        BrokerMissing: This machine cannot start the broker.
        TimeoutError: A phase did not end; the message has the state.
    """
    campaign = Campaign(broker, seed, rollouts, size.lease.lease_s)
    groups = max(8, rollouts // GROUP_SIZE)
    with Deployment(broker, size) as deployment:
        phases = _Phases(deployment, campaign, Random(seed), log)
        with phases.phase(CALM, groups=groups // 5):
            pass
        phases.storm(groups)
        phases.drain()
        phases.duplicate(groups // 10)
        phases.duplicate(groups // 10, stored=True)
        phases.harms()
        phases.limited()
    with Deployment(broker, REAL_LEASE) as deployment:
        _Phases(deployment, campaign, Random(seed), log).kill()
    return campaign


class _Phases:
    """The phases, one after the other, on one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        campaign: Campaign,
        random: Random,
        log: Callable[[str], None],
    ) -> None:
        self._deployment = deployment
        self._campaign = campaign
        self._random = random
        self._log = log

    @contextmanager
    def phase(self, name: str, *, groups: int, **options: Any) -> Iterator[FaultRun]:
        """Begin a run, let the block inject faults, and check the invariants after its end."""
        self._log(f"{name}: {groups * GROUP_SIZE} rollouts")
        run = FaultRun(self._deployment, groups=groups, **options)
        yield run
        run.wait_terminal(timeout_s=_PATIENCE_S)
        evidence = run.evidence()
        figures = count_figures(evidence)
        violations = find_violations(evidence)
        lease_s = self._deployment.size.lease.lease_s
        self._campaign.phases.append(Phase(name, figures, violations, lease_s))
        for violation in violations:
            self._log(f"VIOLATION {violation}")
        self._log(f"  done in {figures.wall_s:.1f} s, {figures.repeated} repeated")

    def storm(self, groups: int) -> None:
        """Inject all faults in random order while rollouts are left; trainers are killed too."""
        deployment = self._deployment
        # One worker's clock is wrong from the beginning (C16); two of each service run (C17).
        deployment.fleet.retire(deployment.workers[0])
        deployment.add_worker({worker.SKEW_VARIABLE: "900"})
        deployment.wait_ready()
        with self.phase(STORM, groups=groups) as run:
            trainers = self._start_trainers(run)
            order: list[str] = []
            faults = injections.applicable(deployment.broker.name)
            while not run.is_done():
                order = order or self._random.sample(sorted(faults), len(faults))
                name = order.pop()
                self._log(f"  {name}  {dict(run.states())}")
                run.note_fault(name)
                faults[name](deployment, self._random)
                time.sleep(self._random.uniform(0.5, 3.0))
            self._end_trainers(trainers)
        self._judge_training(run, trainers)
        deployment.restore()

    def drain(self) -> None:
        """Send SIGTERM to a worker with 500 running rollouts."""
        deployment = self._deployment
        for member in deployment.workers:
            deployment.fleet.retire(member)
        deployment.add_worker(concurrency=DRAINED_IN_FLIGHT)
        deployment.wait_ready()
        with self.phase(DRAIN, groups=DRAINED_IN_FLIGHT // GROUP_SIZE + 10) as run:
            run.wait_running(DRAINED_IN_FLIGHT)
            run.note_fault("C2 SIGTERM of a worker")
            leaving = injections.replace_worker(deployment, self._random)
            code = leaving.process.wait(_PATIENCE_S)
        phase = self._campaign.phases[-1]
        if code != 0:
            phase.violations.append(f"C2: the worker that was stopped ended with {code}")
        if phase.figures.repeated:
            phase.violations.append(f"C2: {phase.figures.repeated} rollouts were executed twice")
        deployment.restore()

    def duplicate(self, groups: int, *, stored: bool = False) -> None:
        """Send every message of every process twice, half of them late.

        Args:
            groups: Groups of the run.
            stored: Whether all bodies are in the payload store, where two executions could meet.
        """
        deployment = self._deployment
        settings = {"ROLLOUT_PAYLOADS__MODE": "object"} if stored else {}
        for member in (*deployment.workers, *deployment.controllers):
            deployment.fleet.retire(member)
        deployment.add_controller({controller.TWICE_VARIABLE: "2", **settings})
        for _ in range(2):
            deployment.add_worker({worker.TWICE_VARIABLE: "4", **settings})
        deployment.wait_ready()
        with self.phase(TWICE_STORED if stored else TWICE, groups=groups) as run:
            run.note_fault("C11 duplicated, reordered, delayed")
            run.wait_executions_end(timeout_s=_PATIENCE_S)
        if stored and not self._campaign.phases[-1].figures.repeated:
            self._campaign.phases[-1].violations.append("C11: no rollout was executed twice")
        deployment.restore()

    def harms(self) -> None:
        """Run a rollout that kills its workers, and two that block their event loops."""
        blocked_s = 2 * self._deployment.size.lease.lease_s
        block = {"harm": "block_loop", "harm_s": blocked_s}
        harms = {0: {"harm": "kill_worker"}, 5: block, 9: block}
        with self.phase(HARM, groups=12, harms=harms, max_lost=3) as run:
            run.note_fault("C12 poison rollout, C13 blocked loop")
        phase = self._campaign.phases[-1]
        poisoned = [f"r{row['rollout_index']} of g{row['group_no']}" for row in self._failed(run)]
        if poisoned != ["r0 of g0"]:
            phase.violations.append(f"C12: failed are {poisoned}, and only r0 of g0 should be")
        self._deployment.restore()

    def limited(self) -> None:
        """Answer most calls with 429 while all workers share a limit."""
        limits = LimitSettings(requests_per_minute=60 * LIMIT_PER_S, burst=LIMIT_BURST)
        asyncio.run(self._set_limits(limits))
        time.sleep(_LIMIT_LEARNED_S)
        with self.phase(LIMITED, groups=60) as run:
            run.wait_running(50)
            run.note_fault("C15 storm of 429, silent calls")
            injections.storm(self._deployment, self._random)
        early = find_early_calls(
            [call["at"] for call in run.evidence().calls],
            since=run.started_at,
            limit_per_s=LIMIT_PER_S,
            burst=LIMIT_BURST,
        )
        self._campaign.phases[-1].violations += list(early)
        asyncio.run(self._set_limits(LimitSettings()))

    def kill(self) -> None:
        """Kill a worker that the supervisor does not restart."""
        with self.phase(KILL, groups=8, gated=True) as run:
            run.wait_running(40)
            run.note_fault("C1 kill -9 of a worker")
            victim = self._random.choice(self._deployment.workers)
            victim.keep = False
            victim.process.kill()
            run.open_gate()
        phase = self._campaign.phases[-1]
        slowest_s = max(phase.figures.recoveries_s, default=0.0)
        promised_s = PROMISED_SQS_S if self._campaign.broker == "sqs" else PROMISED_S
        if slowest_s > phase.lease_s + promised_s:
            phase.violations.append(f"C1: recovery took {slowest_s:.1f} s, lease {phase.lease_s} s")
        if not phase.figures.recoveries_s:
            phase.violations.append("C1: the worker that was killed had nothing to lose")

    def _start_trainers(self, run: FaultRun) -> list[TrainerLives]:
        trainers: list[TrainerLives] = []
        for consumer in ("left", "right"):
            ends = [
                f"{self._random.choice(trainer.PLACES)}:{step}"
                for step in sorted(self._random.sample(range(1, 12), 6))
            ]
            checkpoint = self._deployment.folder / f"checkpoint-{consumer}.json"
            trainers.append(
                TrainerLives(self._deployment, run.slug, consumer, checkpoint, groups=8, ends=ends)
            )
            trainers[-1].start()
        return trainers

    def _end_trainers(self, trainers: list[TrainerLives]) -> None:
        for each in trainers:
            each.join(_PATIENCE_S)
            self._campaign.trainer_deaths += each.deaths

    def _judge_training(self, run: FaultRun, trainers: list[TrainerLives]) -> None:
        violations = self._campaign.phases[-1].violations
        trained: list[str] = []
        for each in trainers:
            if each.failure is not None:
                violations.append(f"C14: trainer {each.consumer}: {each.failure}")
            for groups in trainer.read_checkpoint(each.checkpoint).values():
                trained += groups
        consumed = [str(g["group_id"]) for g in run.evidence().groups if g["state"] == "consumed"]
        if sorted(trained) != sorted(consumed):
            violations.append(f"C14: {len(trained)} groups trained, {len(consumed)} consumed")
        if len(consumed) != run.groups:
            violations.append(f"C14: {run.groups - len(consumed)} groups were not consumed")

    def _failed(self, run: FaultRun) -> list[dict[str, Any]]:
        return [row for row in run.evidence().rollouts if row["state"] == "failed"]

    async def _set_limits(self, limits: LimitSettings) -> None:
        store = LimitStore.connect(self._deployment.limits_url, prefix="rollout:limits")
        try:
            await store.set(self._deployment.model.base_url, "mock", limits)
        finally:
            await store.close()
