"""Scoring a trajectory: a scorer that fails is tried again, without the agent.

Used for attempts by `execution.py` and for stored trajectories by `rescoring.py`. Must not: run an
agent, or turn a failure into a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import ContractError, ErrorClass, RewardError, boundary
from pipeline.contract.messages import RewardPart, storable
from workers.core.trajectory import Trajectory
from workers.process.exit_guard import guard_exits
from workers.rewards.registry import RewardResult, get_reward, score

SCORING_TRIES = 3
SCORING_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reward as a run asks for it."""

    name: str
    config: Mapping[str, Any]
    timeout_s: float

    async def score(
        self, trajectory: Trajectory, prompt: Mapping[str, Any]
    ) -> tuple[float, tuple[RewardPart, ...]]:
        """Return the reward and its parts, the whole first.

        Raises:
            RewardError: It failed every time.
            ContractError: It gave something that is no reward, or no reward has this name.
        """
        # Outside the retries: a name that is unknown stays unknown.
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
        """Return the verdict that there is none."""
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


def _parts(
    name: str, result: RewardResult, version: str, elapsed_ms: float
) -> tuple[RewardPart, ...]:
    whole = RewardPart(
        name=name, value=result.value, scorer_version=version, latency_ms=round(elapsed_ms, 3)
    )
    parts = tuple(
        RewardPart(name=storable(f"{name}.{part}"), value=value, scorer_version=version)
        for part, value in result.parts.items()
    )
    return (whole, *parts)
