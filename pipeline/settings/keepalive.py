"""Options of TCP sockets by which a process notices within a timeout that a host has vanished.

The adapters for Postgres and the broker use it, so that all connections follow one rule. Must not:
open a connection.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Probes on an idle connection, and the wait for an acknowledgement of what was sent.

    Args:
        network_timeout_s: Silence after which a connection is given up, at least two seconds.
    """

    network_timeout_s: float

    @property
    def idle_s(self) -> int:
        """Silence before the first probe."""
        return max(1, int(self.network_timeout_s / 3))

    @property
    def interval_s(self) -> int:
        """Time between two probes."""
        return max(1, int(self.network_timeout_s / 6))

    @property
    def count(self) -> int:
        """Unanswered probes after which the connection is given up."""
        return max(1, int((self.network_timeout_s - self.idle_s) / self.interval_s))

    @property
    def unsent_ms(self) -> int:
        """Wait for the acknowledgement of sent data (`TCP_USER_TIMEOUT`)."""
        return int(self.network_timeout_s * 1000)

    def socket_options(self) -> dict[int, int]:
        """Return options of the level `IPPROTO_TCP`; some systems know only a part of them."""
        values = {
            "TCP_KEEPIDLE": self.idle_s,
            "TCP_KEEPINTVL": self.interval_s,
            "TCP_KEEPCNT": self.count,
            "TCP_USER_TIMEOUT": self.unsent_ms,
        }
        return {getattr(socket, name): n for name, n in values.items() if hasattr(socket, name)}
