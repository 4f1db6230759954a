"""Which model endpoints a worker may call: its settings decide, whatever a message says.

Used by the runtime for every attempt. Must not: hand out keys, or look anything up in the network.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from urllib.parse import urlsplit

from pipeline.contract.errors import ModelBadRequest
from pipeline.settings import Settings

#: Where parsers of URLs disagree about the host.
_READ_DIFFERENTLY = re.compile(r"[\s\\@]")


def allowed_endpoint(base_url: str | None, settings: Settings) -> str:
    """Return the endpoint to call: the one a request names, if it may be, or the worker's own.

    Raises:
        ModelBadRequest: There is none, or this worker may not use the one that is named.
    """
    own = settings.llm.base_url
    base_url = base_url or own
    if base_url is None:
        raise ModelBadRequest(
            "Neither the run nor this worker names a model endpoint. "
            "Give --base-url, or set OPENAI_BASE_URL for the worker.",
            code="no_endpoint",
        )
    _require_readable(base_url)
    known = (own, settings.llm.anthropic_base_url, *settings.worker.allowed_base_urls)
    if not any(same_endpoint(base_url, one) for one in known) and not _is_loopback(base_url):
        raise ModelBadRequest(
            f"This worker may not call {base_url}: it is neither its own endpoint nor on "
            "loopback. To allow it, set ROLLOUT_WORKER__ALLOWED_BASE_URLS for the worker.",
            code="endpoint_not_allowed",
        )
    return base_url


def same_endpoint(left: str, right: str | None) -> bool:
    """Say whether two base URLs are the same place."""
    if right is None:
        return False
    a, b = urlsplit(left), urlsplit(right)
    return (a.scheme, a.netloc.lower(), a.path.rstrip("/")) == (
        b.scheme,
        b.netloc.lower(),
        b.path.rstrip("/"),
    )


def _require_readable(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ModelBadRequest(
            f"{url!r} is not the URL of an endpoint: {error}.", code="bad_endpoint"
        ) from error


@lru_cache(maxsize=64)
def _is_loopback(url: str) -> bool:
    if _READ_DIFFERENTLY.search(url):
        return False
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
