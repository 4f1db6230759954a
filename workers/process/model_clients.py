"""The clients of the model endpoints that this worker calls, shared by the attempts of a run.

Held by the runtime, used on the event loop. Must not: send a key to an endpoint that the key is not
configured for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from pipeline.contract.base_urls import same_endpoint
from pipeline.contract.errors import ConfigError, ModelBadRequest
from pipeline.contract.messages import RolloutRequest
from pipeline.contract.run import TokenWish
from pipeline.limits.local_pause import LocalPauses
from pipeline.limits.pool import LimiterPool
from pipeline.queue.gateway_keys import GatewayKey
from pipeline.settings.sections import LlmSettings
from workers.llm.call_limits import CallLimiter
from workers.llm.call_retries import CallRetries, CallRetryPolicy
from workers.llm.chat_client import ChatClient
from workers.llm.providers import find_provider, make_client
from workers.llm.replicas import Replicas, ReplicatedClient
from workers.llm.server_kind import ServerKinds
from workers.llm.token_capture import KIND_FIELDS, ServerKind
from workers.process.activity import Activity, WatchTry
from workers.process.agent_timeout import off_the_clock
from workers.process.model_calls import ModelClient
from workers.process.unclocked_limiter import UnclockedLimiter

#: A worker serves few runs at a time.
_MAX_CLIENTS = 64

MakeClient = Callable[[str, LlmSettings, CallLimiter, WatchTry, TokenWish], ModelClient]


class ModelClients:
    """One client for each endpoint, model and run.

    Args:
        llm: The settings of the section `llm`.
        limits: The limits of endpoints, or the pauses that stand in for them.
        activity: Counts the calls.
        make_client: Makes the client of an endpoint; None: by the settings.
    """

    def __init__(
        self,
        llm: LlmSettings,
        limits: LimiterPool | LocalPauses,
        activity: Activity,
        make_client: MakeClient | None = None,
    ) -> None:
        self._llm = llm
        self._limits = limits
        self._activity = activity
        self._make_client = make_client or partial(_configured_client, ServerKinds())
        self._replicas = Replicas()
        self._clients: dict[tuple[str, str, str, float], ModelClient] = {}

    def of(
        self, urls: tuple[str, ...], model: str, request: RolloutRequest | GatewayKey
    ) -> ModelClient:
        """Return the client of an attempt for these endpoints.

        Raises:
            ModelBadRequest: A URL is not that of an endpoint.
        """
        clients = {url: self._client(url, model, request) for url in urls}
        if len(clients) == 1:
            return clients[urls[0]]
        # One per attempt: its calls stay on one replica while that is possible.
        return ReplicatedClient(self._replicas, cast(dict[str, ChatClient], clients))

    def _client(
        self, base_url: str, model: str, request: RolloutRequest | GatewayKey
    ) -> ModelClient:
        # Clients share connections, so they are cheap. Each has the limiter of one run.
        key = (base_url, model, request.run, request.weight)
        client = self._clients.get(key)
        if client is None:
            if len(self._clients) >= _MAX_CLIENTS:
                self._clients.clear()
            limiter = UnclockedLimiter(
                self._limits.for_run(base_url, model, run=request.run, weight=request.weight)
            )
            watch = self._activity.watcher(request.run_id, base_url, model)
            client = self._make_client(base_url, self._llm, limiter, watch, request.tokens)
            self._clients[key] = client
        return client


def _configured_client(
    kinds: ServerKinds,
    base_url: str,
    llm: LlmSettings,
    limiter: CallLimiter,
    watch: WatchTry,
    tokens: TokenWish,
) -> ModelClient:
    key = None
    if any(same_endpoint(base_url, own) for own in llm.base_urls):
        key = llm.api_key
    elif same_endpoint(base_url, llm.anthropic_url):
        key = llm.anthropic_api_key
    api_key = key.get_secret_value() if key else ""
    asks = tokens != "off" and find_provider(base_url=base_url).host is None
    try:
        return make_client(
            base_url=base_url,
            api_key=api_key,
            kind=llm.client,
            timeout_s=llm.timeout_s,
            call_retries=CallRetries(
                CallRetryPolicy(max_retries=llm.max_retries),
                sleep=lambda delay_s: off_the_clock(asyncio.sleep(delay_s)),
            ),
            limiter=limiter,
            watch=watch,
            find_capture=partial(_capture_fields, kinds, base_url, api_key, llm.server)
            if asks
            else None,
        )
    except ConfigError as error:
        raise ModelBadRequest(str(error), code="bad_endpoint") from error


async def _capture_fields(
    kinds: ServerKinds, base_url: str, api_key: str, server: str
) -> Mapping[str, Any] | None:
    """Return the request fields by which an endpoint returns ids; None while it does not answer."""
    kind = await kinds.find(base_url, api_key) if server == "auto" else server
    return None if kind is None else KIND_FIELDS[cast(ServerKind, kind)]
