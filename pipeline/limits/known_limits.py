"""The limits that a process knows to be in force: those of its model and of its whole endpoint.

Owned by a `Limiter`, which takes them from replies. Must not decide which call may start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.limits.settings import LimitSettings, Pace
from pipeline.limits.shared_limits import SharedLimits
from pipeline.limits.sync_messages import SyncReply


@dataclass(slots=True)
class KnownLimits:
    """Both limits with their versions in Redis; version 0: none were ever set."""

    version: int = 0
    settings: LimitSettings | None = None
    endpoint_version: int = 0
    endpoint_settings: LimitSettings | None = None
    pace: Pace = field(default_factory=Pace)
    is_unlimited: bool = True

    def are_lost(self, reply: SyncReply) -> bool:
        """Return whether Redis has lost limits that were set."""
        return reply.version == 0 < self.version or reply.endpoint_version == 0 < (
            self.endpoint_version
        )

    def adopt(self, reply: SyncReply) -> bool:
        """Take over the limits in force; return whether they changed."""
        if (reply.version, reply.endpoint_version) == (self.version, self.endpoint_version):
            return False
        if reply.version != self.version:
            self.version, self.settings = reply.version, reply.settings
        if reply.endpoint_version != self.endpoint_version:
            self.endpoint_version = reply.endpoint_version
            self.endpoint_settings = reply.endpoint_settings
        own, of_endpoint = self.settings or LimitSettings(), self.endpoint_settings
        self.is_unlimited = own.is_unlimited and (of_endpoint is None or of_endpoint.is_unlimited)
        self.pace = own.pace().merged(of_endpoint.pace()) if of_endpoint else own.pace()
        return True

    async def restore(self, shared: SharedLimits) -> None:
        """Put the known limits in force again in a Redis that lost them."""
        if self.settings is not None:
            await shared.restore(self.settings)
        if self.endpoint_settings is not None and shared.of_endpoint is not None:
            await shared.of_endpoint.restore(self.endpoint_settings)
