"""Fixtures of the tests of agents' apps."""

from fixtures.agentcore_apps import own_logging

__all__ = ["own_logging"]
