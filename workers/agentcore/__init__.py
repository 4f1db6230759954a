"""Agents that run as HTTP services (Bedrock AgentCore Runtime, any container) as rollout workers.

The names below are loaded when they are first used: importing this package loads neither boto3 nor
bedrock_agentcore nor an agent framework. Must not: import Celery, a database driver or
`pipeline.store`; the app side runs in containers that have none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.agentcore.app import AgentCoreRLApp
    from workers.agentcore.batch import AsyncBatchResult, BatchItem, BatchResult
    from workers.agentcore.batch_runner import BatchRunner
    from workers.agentcore.client import RolloutClient
    from workers.agentcore.frameworks.strands.app import StrandsAgentCoreRLApp
    from workers.agentcore.frameworks.strands.rollout_collector import StrandsRolloutCollector
    from workers.agentcore.reward_function import RewardFunction
    from workers.agentcore.rollout_future import RolloutFuture

__all__ = [
    "AgentCoreRLApp",
    "AsyncBatchResult",
    "BatchItem",
    "BatchResult",
    "BatchRunner",
    "RewardFunction",
    "RolloutClient",
    "RolloutFuture",
    "StrandsAgentCoreRLApp",
    "StrandsRolloutCollector",
]

_MODULES = {
    "AgentCoreRLApp": "workers.agentcore.app",
    "AsyncBatchResult": "workers.agentcore.batch",
    "BatchItem": "workers.agentcore.batch",
    "BatchResult": "workers.agentcore.batch",
    "BatchRunner": "workers.agentcore.batch_runner",
    "RolloutClient": "workers.agentcore.client",
    "RolloutFuture": "workers.agentcore.rollout_future",
    "RewardFunction": "workers.agentcore.reward_function",
    "StrandsAgentCoreRLApp": "workers.agentcore.frameworks.strands.app",
    "StrandsRolloutCollector": "workers.agentcore.frameworks.strands.rollout_collector",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'workers.agentcore' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
