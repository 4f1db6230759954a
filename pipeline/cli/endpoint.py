"""The model endpoint as the command line sees it: does it answer, and with which models.

Used by `run` and `doctor`. One bounded request; a key goes only to the endpoint it belongs to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.contract.errors import ConfigError, ServiceUnavailable

if TYPE_CHECKING:
    from pipeline.settings import Settings

E_NO_ENDPOINT = "E103"
E_ENDPOINT_DOWN = "E204"

PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What an endpoint said to `GET /models`; `error` None: it answered as it should."""

    models: tuple[str, ...] = ()
    status: int | None = None
    error: str | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether somebody answered, be it with a refusal."""
        return self.status is not None


def endpoint_of(settings: Settings, base_url: str | None) -> str:
    """Return the endpoint a local run uses.

    Raises:
        ConfigError: None is named.
    """
    url = base_url or settings.llm.base_url
    if url is None:
        raise ConfigError(
            "No model endpoint is named.",
            remedy="Give --base-url URL or set OPENAI_BASE_URL. Without a model, start the "
            "stand-in in another terminal: `rollout offline-policy --port 8399`, and give "
            "--base-url http://127.0.0.1:8399/v1",
            code=E_NO_ENDPOINT,
        )
    return url


def is_local(base_url: str) -> bool:
    """Whether an endpoint is on this machine; every worker may call it."""
    return urlsplit(base_url).hostname in ("localhost", "127.0.0.1", "::1")


def probe(settings: Settings, base_url: str) -> Probe:
    """Ask an endpoint for its models, for at most two seconds."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(base_url.rstrip("/") + "/models")
    key = settings.llm.api_key
    if key and settings.llm.base_url in (base_url, None):
        request.add_header("Authorization", f"Bearer {key.get_secret_value()}")
    try:
        with _opener(base_url).open(request, timeout=PROBE_S) as answer:
            listed = json.loads(answer.read(1_000_000))
            return Probe(tuple(str(model["id"]) for model in listed["data"]), answer.status)
    except urllib.error.HTTPError as error:
        return Probe(status=error.code, error=f"It answers {error.code} to GET /models.")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Probe(error=f"{reason}".strip() or type(error).__name__)
    except (KeyError, TypeError):
        return Probe(status=200, error="Its answer to GET /models is no list of models.")


def require_endpoint(settings: Settings, base_url: str) -> Probe:
    """Return what the endpoint says.

    Raises:
        ServiceUnavailable: Nobody answers there.
    """
    found = probe(settings, base_url)
    if not found.is_reachable:
        raise ServiceUnavailable(
            f"The model endpoint {base_url} does not answer.",
            why=f"{found.error}.",
            remedy="Start it, or name another with --base-url.",
            code=E_ENDPOINT_DOWN,
        )
    return found


def _opener(base_url: str) -> Any:
    import urllib.request

    # A proxy has no business with what is on this machine.
    handlers = [urllib.request.ProxyHandler({})] if is_local(base_url) else []
    return urllib.request.build_opener(*handlers)
