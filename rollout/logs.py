"""The logging configuration: stderr, one format.

Long-running commands call it; the others do not log.
"""

from __future__ import annotations

import logging
import sys

#: Libraries that log every request, connection or step at INFO.
_VERBOSE = ("alembic", "amqp", "asyncio", "botocore", "httpcore", "httpx", "openai", "urllib3")


def log_to_stderr(level: str) -> None:
    """Send log lines of this severity and above to stderr."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
