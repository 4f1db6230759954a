"""Durable rollouts for agentic RL and evaluation: the names that users import.

The subpackages of `rollout` are the command line, which combines producers, pipeline and workers.
Each public name is loaded at its first use, so that importing the package is fast. Must not be
imported by producers, pipeline or workers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.contract.run import RunConfig
    from pipeline.contract.train_batch import BatchSpec, NotReady
    from pipeline.trainer.async_client import AsyncTrainerClient
    from pipeline.trainer.client import TrainerClient
    from producers.enqueue import enqueue
    from workers.core.registry import register_agent
    from workers.core.tool_registry import tool
    from workers.rewards.registry import register_reward

__all__ = [
    "AsyncTrainerClient",
    "BatchSpec",
    "NotReady",
    "RunConfig",
    "TrainerClient",
    "enqueue",
    "register_agent",
    "register_reward",
    "tool",
]

_HOMES = {
    "AsyncTrainerClient": "pipeline.trainer.async_client",
    "BatchSpec": "pipeline.contract.train_batch",
    "NotReady": "pipeline.contract.train_batch",
    "RunConfig": "pipeline.contract.run",
    "TrainerClient": "pipeline.trainer.client",
    "enqueue": "producers.enqueue",
    "register_agent": "workers.core.registry",
    "register_reward": "workers.rewards.registry",
    "tool": "workers.core.tool_registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
