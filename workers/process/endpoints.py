"""The endpoints of models and agents that a worker may call: its settings decide, no message does.

Used by the runtime for every attempt, and for the list of endpoints in heartbeats. Must not: hand
out keys, or look anything up in the network.
"""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import urlsplit

from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.base_urls import may_call, same_endpoint, urls_of, without_credentials
from pipeline.contract.errors import ContractError, ModelBadRequest
from pipeline.contract.url_secrets import hide_passwords
from pipeline.settings import Settings


def allowed_endpoints(
    base_url: str | tuple[str, ...] | None, settings: Settings
) -> tuple[str, ...]:
    """Return the endpoints to call: those of the request if they are allowed, or the worker's.

    Raises:
        ModelBadRequest: No endpoint is named, or this worker may not call a named one.
    """
    urls = urls_of(base_url) or settings.llm.base_urls
    if not urls:
        raise ModelBadRequest(
            "Neither the run nor this worker names a model endpoint. "
            "Give --base-url, or set OPENAI_BASE_URL for the worker.",
            code="no_endpoint",
        )
    known = _known(settings)
    for url in urls:
        _require_readable(url)
        if not may_call(url, known):
            raise ModelBadRequest(
                f"This worker may not call {hide_passwords(url)}: it is neither its own endpoint "
                "nor on loopback. To allow it, set ROLLOUT_WORKER__ALLOWED_BASE_URLS for the "
                "worker.",
                code="endpoint_not_allowed",
            )
    return tuple(_with_own_credentials(url, known) for url in urls)


def require_allowed_target(target: AgentCoreTarget, settings: Settings) -> None:
    """Check that this worker may call the container of a remote agent.

    A runtime's ARN needs no entry: AWS decides by the permissions of the worker's credentials.

    Raises:
        ContractError: The container is neither on loopback nor in the settings.
    """
    if not target.is_arn and not may_call(target.target, _known(settings)):
        raise ContractError(
            f"This worker may not call {target.target}: it is neither in its settings nor on "
            "loopback. To allow it, set ROLLOUT_WORKER__ALLOWED_BASE_URLS for the worker.",
            code="endpoint_not_allowed",
        )


def announced_endpoints(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints that this worker may call besides loopback, without credentials."""
    announced: list[str] = []
    for url in _known(settings):
        # A URL that cannot be parsed fails the first attempt that would call it.
        with suppress(ValueError):
            announced.append(without_credentials(url))
    return tuple(dict.fromkeys(announced))


def _known(settings: Settings) -> tuple[str, ...]:
    anthropic = settings.llm.anthropic_url
    return (
        *settings.llm.base_urls,
        *((anthropic,) if anthropic else ()),
        *settings.worker.allowed_urls,
    )


def _with_own_credentials(url: str, known: tuple[str, ...]) -> str:
    """Return this worker's own URL of an endpoint if it has credentials: runs carry none."""
    own = (each for each in known if "@" in each and same_endpoint(url, each))
    return next(own, url)


def _require_readable(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ModelBadRequest(
            f"{hide_passwords(url)!r} is not the URL of an endpoint: its port is no number.",
            code="bad_endpoint",
        ) from None  # the cause may show a part of the password
