"""Where log lines go: stderr, one format.

Called by commands that run for long; the others are quiet.
"""

from __future__ import annotations

import logging
import sys

#: Libraries that tell every request, connection or step at INFO.
_TALKATIVE = ("alembic", "amqp", "asyncio", "botocore", "httpcore", "httpx", "openai", "urllib3")


def log_to_stderr(level: str) -> None:
    """Send log lines of this severity and above to stderr."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
