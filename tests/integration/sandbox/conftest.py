from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fixtures.sandboxes import (
    CONFINING,
    LIMITS,
    Marked,
    require_confined,
    require_kind,
    require_own_pid_namespace,
)

from workers.sandbox.base import Sandbox
from workers.sandbox.kinds import SandboxKind, open_sandbox


@pytest.fixture(params=[*CONFINING, "process"])
def kind(request: pytest.FixtureRequest) -> SandboxKind:
    """Each local kind; a module marked `hostile` meets `process` only where it can do no harm."""
    if request.param in CONFINING:
        require_kind(request.param)
    elif request.node.get_closest_marker("hostile"):
        require_own_pid_namespace()
    return request.param


@pytest.fixture
async def sandbox(kind: SandboxKind) -> AsyncIterator[Sandbox]:
    """Each local kind, on a directory of its own."""
    async with await open_sandbox(kind, limits=LIMITS) as opened:
        yield opened


@pytest.fixture(params=CONFINING)
def confining_kind(request: pytest.FixtureRequest) -> SandboxKind:
    """The kinds that confine."""
    require_kind(request.param)
    return request.param


@pytest.fixture
async def confined(confining_kind: SandboxKind) -> AsyncIterator[Sandbox]:
    """Each kind that confines, on a directory of its own."""
    async with await open_sandbox(confining_kind, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def only_confined() -> None:
    """For modules that run what a model could have written, in the sandbox of `auto`."""
    require_confined()


@pytest.fixture
def mark() -> Marked:
    return Marked()
