"""Checks of the model endpoints by the command line: whether they answer, and with which models.

`run`, `resume` and `doctor` use it. Requests are bounded in time and size. A key is sent only to
endpoints in the caller's settings or options. Must not: call a model.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from pipeline.contract.base_urls import (
    carries_credentials,
    same_endpoint,
    urls_of,
    without_credentials,
)
from pipeline.contract.errors import ConfigError, InputError, ServiceUnavailable
from pipeline.contract.run import RunConfig
from pipeline.settings import Settings
from rollout.output import note
from workers.llm.model_list import ModelList, list_models

E_NO_ENDPOINT = "E103"
E_URL_LACKS_V1 = "E125"
E_ENDPOINT_DOWN = "E204"

PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Probe(ModelList):
    """The models that an endpoint lists, and whether its URL is right."""

    right_url: str | None = None  #: the URL with /v1, if the endpoint answers only there

    @property
    def is_reachable(self) -> bool:
        """Whether a server answered, even with an error status."""
        return self.status is not None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints and the model of a run's own workers; model None means several models."""

    urls: tuple[str, ...]
    model: str | None


def endpoints_of(settings: Settings, base_url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the endpoints that a local run uses, without credentials.

    Raises:
        ConfigError: Neither the run nor the settings have an endpoint.
    """
    # Runs are stored, shown and sent: credentials stay in the settings.
    urls = urls_of(base_url) or tuple(map(without_credentials, settings.llm.base_urls))
    if not urls:
        raise ConfigError(
            "No model endpoint is named.",
            remedy="Give --base-url URL or set OPENAI_BASE_URL. Without a model, start the "
            "stand-in in another terminal: `rollout offline-policy --port 8399`, and give "
            "--base-url http://127.0.0.1:8399/v1",
            code=E_NO_ENDPOINT,
        )
    return urls


def find_endpoints(settings: Settings, config: RunConfig, *, named: Collection[str]) -> Endpoints:
    """Probe the endpoints of a local run; return them with the model.

    Args:
        settings: Their endpoints and model are the defaults.
        config: The run's configuration.
        named: Endpoints in the caller's own options.

    Raises:
        ConfigError: No endpoint is configured, or its base URL lacks its /v1.
        InputError: A named endpoint carries credentials.
        ServiceUnavailable: None of the endpoints answers.
    """
    if any(carries_credentials(url) for url in named):
        raise InputError(
            "A base URL of a run carries no credentials.",
            why="Runs are stored and shown, and travel in every request.",
            remedy="Name it without them, and set OPENAI_BASE_URL with them for the workers.",
            code="E106",
        )
    urls = endpoints_of(settings, config.base_url)
    models = require_endpoints(settings, urls, named=named)
    only = models[0] if len(models) == 1 else None
    return Endpoints(urls, config.model or settings.llm.model or only)


def worker_environment(
    settings: Settings, endpoints: Endpoints, *, named: Collection[str]
) -> dict[str, str]:
    """Return the environment variables that allow our own workers to call their run's endpoints.

    A key in the settings belongs to the endpoint in the settings. If the settings have none, the
    key belongs to the endpoints in the caller's options. Other endpoints are called without a key.
    """
    own = settings.llm.base_urls
    variables: dict[str, str] = {}
    if all(_is_among(url, own or named) for url in endpoints.urls):
        variables["ROLLOUT_LLM__BASE_URL"] = json.dumps(own or endpoints.urls)
    else:
        if settings.llm.api_key and not own:
            note(
                f"No API key is sent to {', '.join(endpoints.urls)}: only the run names it. "
                "To send yours, give --base-url or set OPENAI_BASE_URL."
            )
        allowed = [*settings.worker.allowed_urls, *endpoints.urls]
        variables["ROLLOUT_WORKER__ALLOWED_BASE_URLS"] = json.dumps(allowed)
    if settings.llm.model is None and endpoints.model is not None:
        variables["ROLLOUT_LLM__MODEL"] = endpoints.model
    return variables


def probe(settings: Settings, base_url: str, *, named: Collection[str] = ()) -> Probe:
    """Ask an endpoint for its models, for at most two seconds; four if the URL may lack /v1.

    Args:
        settings: Their key, or else the user and password of their URL, is sent to their endpoints.
        base_url: The endpoint.
        named: Endpoints that get the key if the settings have none.
    """
    owners = settings.llm.base_urls or named
    own = next((url for url in owners if same_endpoint(base_url, url)), None)
    secret = _authorization(settings, own) if own else None
    base_url = without_credentials(base_url)
    found = list_models(base_url, secret, timeout_s=PROBE_S)
    right_url = base_url.rstrip("/") + "/v1"
    is_wrong_path = found.error is not None and found.status in (200, 404, 405)
    if is_wrong_path and not base_url.rstrip("/").endswith("/v1"):
        below = list_models(right_url, secret, timeout_s=PROBE_S)
        if below.error is None:
            return Probe(below.models, found.status, found.error, right_url)
    return Probe(found.models, found.status, found.error)


def require_endpoints(
    settings: Settings, urls: tuple[str, ...], *, named: Collection[str]
) -> tuple[str, ...]:
    """Return the models that the endpoints list; if only some are down, a warning is printed.

    Raises:
        ConfigError: A base URL lacks its /v1.
        ServiceUnavailable: None of the endpoints answers.
    """
    with ThreadPoolExecutor(len(urls)) as threads:
        probes = list(threads.map(lambda url: probe(settings, url, named=named), urls))
    found = dict(zip(urls, probes, strict=True))
    for url, each in found.items():
        _require_right_url(url, each)
    down = {url: each for url, each in found.items() if not each.is_reachable}
    if len(down) == len(found):
        raise ServiceUnavailable(
            f"The model endpoint {', '.join(urls)} does not answer.",
            why=f"{next(iter(down.values())).error}.",
            remedy="Start it, or name another with --base-url.",
            code=E_ENDPOINT_DOWN,
        )
    for url, each in found.items():
        if url in down:
            note(f"Warning: {url} does not answer: {each.error}. The others take its calls.")
        elif each.error:
            note(f"Warning: {url}: {each.error} Rollouts fail if its base URL is another.")
    return tuple(dict.fromkeys(model for each in probes for model in each.models))


def _require_right_url(url: str, found: Probe) -> None:
    if found.right_url is None:
        return
    raise ConfigError(
        f"{url} is not the base URL of the model server.",
        why=f"{found.error} {found.right_url} lists its models.",
        remedy=f"Name it with its /v1: --base-url {found.right_url}",
        code=E_URL_LACKS_V1,
    )


def _authorization(settings: Settings, url: str) -> str | None:
    if settings.llm.api_key:
        return f"Bearer {settings.llm.api_key.get_secret_value()}"
    userinfo, at, _ = urlsplit(url).netloc.rpartition("@")
    return f"Basic {b64encode(unquote(userinfo).encode()).decode()}" if at else None


def _is_among(url: str, urls: Collection[str]) -> bool:
    return any(same_endpoint(url, one) for one in urls)
