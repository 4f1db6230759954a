"""The names that users import from `rollout`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollout
from pipeline.contract.run import RunConfig
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.trainer.async_client import AsyncTrainerClient
from pipeline.trainer.client import TrainerClient
from producers.enqueue import enqueue
from workers.core.registry import register_agent
from workers.core.tool_registry import tool
from workers.rewards.registry import register_reward

NAMES = {
    "AsyncTrainerClient": AsyncTrainerClient,
    "BatchSpec": BatchSpec,
    "NotReady": NotReady,
    "RunConfig": RunConfig,
    "TrainerClient": TrainerClient,
    "enqueue": enqueue,
    "register_agent": register_agent,
    "register_reward": register_reward,
    "tool": tool,
}


def test_the_package_gives_these_names_and_no_others() -> None:
    assert set(rollout.__all__) == set(NAMES)
    assert {name: getattr(rollout, name) for name in NAMES} == NAMES
    assert set(NAMES) <= set(dir(rollout))


def test_a_name_that_it_does_not_have_is_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainer_client'"):
        _ = rollout.trainer_client  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import rollout, sys; print(*(n for n in ('pipeline', 'workers') if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
