"""A store for the tests; `make test-verl` runs them without the suite's own fixtures."""

from __future__ import annotations

from fixtures.store_alone import engine, servers

__all__ = ["engine", "servers"]
