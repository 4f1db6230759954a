"""Private PostgreSQL and Redis servers for a machine that has none.

Entry points call `EmbeddedServices(data_dir)`; everything else in this package is its own
business. Must not: be needed by anyone who has servers (URLs are all the rest of the code sees).
"""

from __future__ import annotations

from pipeline.embedded.services import Borrowed, EmbeddedServices, ServiceStatus

__all__ = ["Borrowed", "EmbeddedServices", "ServiceStatus"]
