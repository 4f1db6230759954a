from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fixtures.sandboxes import LIMITS, Marked, require_bubblewrap

from workers.sandbox.backends import SandboxKind, open_sandbox
from workers.sandbox.base import Sandbox


@pytest.fixture(params=["bubblewrap", "process"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """Both local kinds, on a directory of their own."""
    kind: SandboxKind = request.param
    if kind == "bubblewrap":
        require_bubblewrap()
    async with await open_sandbox(kind, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
async def bubblewrap() -> AsyncIterator[Sandbox]:
    require_bubblewrap()
    async with await open_sandbox("bubblewrap", limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def mark() -> Marked:
    return Marked()
