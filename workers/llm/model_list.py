"""The models that an OpenAI-compatible endpoint lists.

Used by the command line before a run, and by clients of the library that have no model. Must not:
import an SDK, or follow a redirect, which would send the key to another address.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.contract.base_urls import is_loopback

_MOST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelList:
    """An endpoint's answer to `GET /models`; `error` is None after a valid answer."""

    models: tuple[str, ...] = ()
    status: int | None = None  #: HTTP status; None if no server answered
    error: str | None = None


def list_models(base_url: str, authorization: str | None = None, *, timeout_s: float) -> ModelList:
    """Ask an endpoint for its models; blocks for at most about `timeout_s`.

    Args:
        base_url: The endpoint, without credentials.
        authorization: The value of the header, such as `Bearer KEY`.
        timeout_s: Longest wait for the connection, and for each part of the answer.
    """
    # Imported here, because clients that have a model, such as a worker's, never need it.
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(base_url.rstrip("/") + "/models")
        if authorization:
            request.add_header("Authorization", authorization)
        with _opener(base_url).open(request, timeout=timeout_s) as answer:
            return _listed(answer.status, answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        return ModelList(
            status=error.code, error=f"The endpoint answers {error.code} to GET /models."
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return ModelList(error=f"{reason}".strip() or type(error).__name__)


def _listed(status: int, body: bytes) -> ModelList:
    try:
        return ModelList(tuple(str(model["id"]) for model in json.loads(body)["data"]), status)
    except (ValueError, LookupError, TypeError):
        error = "The answer to GET /models is no list of models."
        return ModelList(status=status, error=error)


def _opener(base_url: str) -> Any:
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Follow no redirect."""

    # Loopback addresses are called without a proxy.
    handlers = [urllib.request.ProxyHandler({})] if is_loopback(base_url) else []
    return urllib.request.build_opener(NoRedirects, *handlers)
