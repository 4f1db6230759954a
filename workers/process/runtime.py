"""The objects that all attempts of a process share: agents, model clients, the in-flight list.

Made once by a worker, an isolated process or a gateway, and used by `execution.py`. A base URL that
the settings do not allow is rejected here. Must not: run an attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any

from pipeline.contract.errors import PipelineError
from pipeline.contract.messages import RolloutRequest
from pipeline.limits.local_pause import LocalPauses
from pipeline.limits.pool import LimiterPool
from pipeline.queue.gateway_keys import GatewayKey, gateway_key_of
from pipeline.queue.journal_frames import has_journal, read_journal
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.redaction import NOTHING, Redactor
from pipeline.settings import Settings
from workers.core.endpoint import Endpoint
from workers.llm.connections import close_connections
from workers.process.activity import Activity
from workers.process.agent_cache import AgentCache
from workers.process.attempt import Attempt
from workers.process.call_warnings import CallWarnings
from workers.process.endpoints import allowed_endpoints
from workers.process.in_flight import InFlight
from workers.process.isolation import Isolation
from workers.process.journal import NOTHING_RECORDED, Journal, MakeFrame
from workers.process.model_calls import ModelCalls, ModelClient
from workers.process.model_clients import MakeClient, ModelClients
from workers.process.policies import Policies, PolicyClient
from workers.process.remote_session import RemoteSessions
from workers.process.worker_gateway import WorkerGateway
from workers.rewards.reward_processes import close_reward_processes

log = logging.getLogger(__name__)


class Runtime:
    """The objects that all attempts of a worker share; used on the event loop only.

    Args:
        settings: The worker's settings.
        worker_id: This process's name.
        limits: Limits shared with the other workers; None: calls only pause after 429s.
        make_client: Makes the client of an endpoint.
        redactor: Removes secrets from the records of attempts.
        activity: Counts model calls and tool calls; made here by default.
        isolates: Whether rollouts that were lost before get processes of their own.
        keep: Takes the frames of journals; None: nothing is recorded for later attempts.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        *,
        limits: LimiterPool | LocalPauses | None = None,
        make_client: MakeClient | None = None,
        redactor: Redactor = NOTHING,
        activity: Activity | None = None,
        isolates: bool = False,
        keep: Callable[[MakeFrame], None] | None = None,
    ) -> None:
        self.redactor = redactor
        self.settings = settings
        self.worker_id = worker_id
        self.in_flight = InFlight()
        self.policies = Policies()
        self.activity = activity or Activity(
            CallWarnings(f"Each call is tried again up to {settings.llm.max_retries} times."),
            redactor=redactor,
        )
        #: None: this process runs every attempt itself.
        self.isolation = (
            Isolation(settings, worker_id, self.in_flight, self.activity, keep=keep)
            if isolates
            else None
        )
        self.gateway = WorkerGateway(settings)
        self.agents = AgentCache(settings)
        self._keep = keep
        self._limits = limits or LocalPauses()
        self._clients = ModelClients(settings.llm, self._limits, self.activity, make_client)
        self.remote_sessions = RemoteSessions(settings, self._limits)

    @cached_property
    def payloads(self) -> PayloadStore:
        """The payload store, opened at its first use."""
        return open_payloads(self.settings)

    async def close(self) -> None:
        """Close the servers and connections of this process, except the isolated processes."""
        await self.gateway.close()
        await self.remote_sessions.close()
        await self.agents.close()
        await self._limits.close()
        await close_connections()
        await close_reward_processes()

    async def open_journal(self, request: RolloutRequest) -> Journal:
        """Return the journal of an attempt, with the calls that earlier attempts recorded.

        Left out are calls whose weights are staler than the run allows, because their group would
        be dropped, and a journal that cannot be read: the attempt then makes these calls itself.
        """
        recorded = NOTHING_RECORDED
        if has_journal(request):
            try:
                recorded = await asyncio.to_thread(lambda: read_journal(request, self.payloads))
                oldest = self._oldest_version(request)
                fresh = [c for c in recorded.calls if c.version is None or c.version >= oldest]
                recorded = recorded._replace(calls=fresh)
            except PipelineError as error:
                log.warning("%s starts afresh, without its journal: %s", request.label, error)
        return Journal(
            request,
            self.settings.journal,
            recorded=recorded,
            keep=self._keep,
            redactor=self.redactor,
        )

    def _oldest_version(self, request: RolloutRequest) -> int:
        """Return the oldest version whose recorded calls may be replayed."""
        self.policies.learn((request.policy,))
        policy = self.policies.of(request.run_id).current
        if policy is None or request.max_staleness is None:
            return 0
        return policy.version - request.max_staleness

    def model_calls(self, attempt: Attempt) -> ModelCalls:
        """Return the object through which one attempt calls its model.

        Raises:
            ModelBadRequest: No endpoint is named, or this worker may not call it.
        """
        request = attempt.request
        model = request.model or self.settings.llm.model or "default"
        self.policies.learn((request.policy,))

        def client_of(endpoints: tuple[str, ...]) -> ModelClient:
            urls = allowed_endpoints(endpoints or request.base_url, self.settings)
            return self._clients.of(urls, model, request)

        def serve(
            generate: Callable[..., Any], *, with_socket: bool
        ) -> AbstractAsyncContextManager[Endpoint]:
            # The key is made here, because few agents ask for an endpoint.
            key = gateway_key_of(request, model)
            return self.gateway.serving(key, generate, with_socket=with_socket)

        client = PolicyClient(
            self.policies.of(request.run_id),
            client_of,
            pause_wait_s=self.settings.worker.policy_pause_wait_s,
        )
        return ModelCalls(
            client,
            model=model,
            defaults=self._defaults(request.label),
            overrides=request.own_sampling,
            tokens=request.tokens,
            serve=serve,
            journal=attempt.journal,
        )

    def calls_of_key(self, key: GatewayKey) -> ModelCalls:
        """Return the model calls of an attempt that runs elsewhere.

        Raises:
            ModelBadRequest: No endpoint is named, or this process may not call it.
        """
        urls = allowed_endpoints(key.base_url, self.settings)
        return ModelCalls(
            self._clients.of(urls, key.model, key),
            model=key.model,
            defaults=self._defaults(key.label),
            overrides=key.sampling,
            tokens=key.tokens,
        )

    def _defaults(self, label: str) -> dict[str, Any]:
        """Return the parameters that an agent may override: the rollout's label as the `user`."""
        return {"user": label.rpartition("-a")[0]} if self.settings.llm.tag_requests else {}


def open_limits(settings: Settings, process: str) -> LimiterPool | LocalPauses:
    """Return the limits that this process shares with others; without a Redis its own pauses."""
    url = settings.limits_redis_url
    if url is None:
        return LocalPauses()
    return LimiterPool(url, prefix=settings.limits_prefix, process=process)
