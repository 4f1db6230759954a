"""Registries that forget what a test registered, and attempts that run against a real endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker

from workers.core.registry import clear_registry


@pytest.fixture
def make_worker(make_settings: Callable[..., Any]) -> Callable[..., ScriptedWorker]:
    """Make a worker that calls the model at a base URL."""

    def make(base_url: str, **sections: Any) -> ScriptedWorker:
        llm = {"base_url": base_url, "max_retries": 0, **sections.pop("llm", {})}
        return ScriptedWorker(make_settings(llm=llm, **sections), real=True)

    return make


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    yield
    clear_registry()
