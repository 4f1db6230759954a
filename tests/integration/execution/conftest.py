"""Workers with a scripted model, and registries that forget what a test registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker

from workers.core.registry import clear_registry
from workers.core.tool_registry import get_global_tool_registry
from workers.rewards.registry import clear_rewards

WorkerMaker = Callable[..., ScriptedWorker]


@pytest.fixture
def make_worker(make_settings: Callable[..., Any]) -> WorkerMaker:
    """Make a worker whose model gives these replies; or with `llm=...`, a real endpoint."""

    def make(*replies: Any, **given: Any) -> ScriptedWorker:
        sections = dict(given)
        llm = {"base_url": "http://127.0.0.1:9/v1", **sections.pop("llm", {})}
        real = "llm" in given
        return ScriptedWorker(make_settings(llm=llm, **sections), *replies, real=real)

    return make


@pytest.fixture(autouse=True)
def _fresh_registries() -> Iterator[None]:
    yield
    clear_registry()
    clear_rewards()
    get_global_tool_registry().clear_registry()
