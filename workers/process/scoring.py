"""The scoring of a trajectory: of an attempt, or of a stored record without its agent.

Used by `execution.py` and by the Celery task `rollout.rescore`. A scorer that fails is tried again.
Must not: run an agent, or turn a failure into a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import (
    ContractError,
    ErrorClass,
    RewardError,
    RolloutError,
    boundary,
)
from pipeline.contract.messages import (
    Completion,
    ErrorRecord,
    RescoreRequest,
    RewardPart,
    storable,
)
from pipeline.queue.payloads import PayloadStore
from pipeline.redaction import NOTHING, Redactor
from workers.core.trajectory import Trajectory
from workers.process.exit_guard import guard_exits
from workers.process.records import stop_reason_of
from workers.process.stored_trajectory import read_trajectory
from workers.rewards.registry import RewardResult, get_reward, score

SCORING_TRIES = 3
SCORING_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Scorer:
    """A run's reward with its options."""

    name: str
    config: Mapping[str, Any]
    timeout_s: float

    async def score(
        self, trajectory: Trajectory, prompt: Mapping[str, Any]
    ) -> tuple[float, tuple[RewardPart, ...]]:
        """Return the reward and its parts; the first part is the reward itself.

        Raises:
            RewardError: The scorer failed every time.
            ContractError: The scorer's result is no reward, or no reward has this name.
        """
        # Outside the retries, because an unknown name stays unknown.
        with boundary(RewardError):
            version = get_reward(self.name).version
        loop = asyncio.get_running_loop()
        started = loop.time()
        for tries in range(1, SCORING_TRIES + 1):
            try:
                result = await self._once(trajectory, prompt)
                break
            except RewardError:
                if tries == SCORING_TRIES:
                    raise
                await asyncio.sleep(SCORING_WAIT_S * tries)
        return result.value, _parts(self.name, result, version, (loop.time() - started) * 1000)

    def failed(self, error_class: ErrorClass) -> RewardPart:
        """Return the part that records the failure of this scorer."""
        try:
            version = get_reward(self.name).version
        except (ContractError, ImportError):
            version = "unknown"
        return RewardPart(
            name=self.name,
            value=None,
            status="error",
            error_class=error_class,
            scorer_version=version,
        )

    async def _once(self, trajectory: Trajectory, prompt: Mapping[str, Any]) -> RewardResult:
        with boundary(RewardError), guard_exits(RewardError, "scorer"):
            return await score(
                self.name,
                response=trajectory.get_final_response(),
                prompt=prompt,
                trajectory=trajectory,
                timeout_s=self.timeout_s,
                config=self.config,
            )


async def rescore(
    request: RescoreRequest,
    payloads: PayloadStore,
    worker_id: str,
    *,
    redactor: Redactor = NOTHING,
) -> Completion:
    """Score a stored trajectory; a failure is an outcome too."""
    scorer = Scorer(request.reward, request.reward_config, request.reward_timeout_s)
    outcome: dict[str, Any]
    try:
        with boundary(RewardError, "no_trajectory"):
            trajectory = await read_trajectory(request, payloads, label=request.label)
        value, parts = await scorer.score(trajectory, request.prompt)
        outcome = {
            "outcome": "succeeded",
            "reward": value,
            "reward_parts": parts,
            "stop_reason": stop_reason_of(trajectory),
        }
    except RolloutError as error:
        record = ErrorRecord(
            error_class=error.error_class,
            code=storable(error.code),
            message=storable(redactor.text(str(error))),
            phase="scoring",
        )
        part = scorer.failed(error.error_class)
        outcome = {"outcome": "failed", "error": record, "reward_parts": (part,)}
    return Completion(**request.identity, worker_id=worker_id, purpose="rescore", **outcome)


def _parts(
    name: str, result: RewardResult, version: str, elapsed_ms: float
) -> tuple[RewardPart, ...]:
    whole = RewardPart(
        name=name, value=result.value, scorer_version=version, latency_ms=round(elapsed_ms, 3)
    )
    parts = tuple(
        RewardPart(name=f"{name}.{part}", value=value, scorer_version=version)
        for part, value in result.parts.items()
    )
    return (whole, *parts)
