"""Private PostgreSQL and Redis servers for a machine that has none.

Entry points call `EmbeddedServices(data_dir)`; the rest of this package is private. Other code gets
only URLs. Must not: be required by users with their own servers.
"""

from __future__ import annotations

from pipeline.embedded.services import Borrowed, EmbeddedServices, ServiceStatus

__all__ = ["Borrowed", "EmbeddedServices", "ServiceStatus"]
