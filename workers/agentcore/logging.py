"""Log lines of an app as JSON, with the session and request they belong to.

`AgentCoreRLApp` configures it when it is made. Must not: touch handlers a second time.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class CorrelatedFormatter(logging.Formatter):
    """One JSON object per line: timestamp, level, message, logger, requestId, sessionId, error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "timestamp": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
        }
        line |= {name: value for name, value in _correlation().items() if value}
        if record.exc_info and record.exc_info[0] is not None:
            line["errorType"] = record.exc_info[0].__name__
            line["errorMessage"] = str(record.exc_info[1])
            line["stackTrace"] = self.formatException(record.exc_info).splitlines()
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging() -> None:
    """Write the root logger's lines as JSON to stderr, from INFO on; a second call does nothing."""
    root = logging.getLogger()
    if any(isinstance(handler.formatter, CorrelatedFormatter) for handler in root.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(CorrelatedFormatter())
    root.handlers[:] = [handler]
    root.setLevel(min(root.level, logging.INFO) or logging.INFO)
    # The SDK's logger has a JSON handler of its own.
    logging.getLogger("bedrock_agentcore.app").propagate = False


def _correlation() -> dict[str, str | None]:
    try:
        from bedrock_agentcore.runtime import BedrockAgentCoreContext as Context
    except ModuleNotFoundError:
        return {}
    return {"requestId": Context.get_request_id(), "sessionId": Context.get_session_id()}
