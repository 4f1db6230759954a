"""The objects that all attempts of a worker share: agents, model clients, the in-flight list.

Built once by `run_worker`, used by `execution.py`. A base URL that the worker's settings do not
allow is rejected here. Must not: send a key to an endpoint that the key is not configured for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson

from pipeline.contract.base_urls import same_endpoint
from pipeline.contract.errors import ConfigError, ModelBadRequest, PipelineError, SandboxError
from pipeline.contract.messages import RolloutRequest
from pipeline.contract.rollout import label_of
from pipeline.contract.run import TokenWish
from pipeline.limits.local_pause import LocalPauses
from pipeline.limits.pool import LimiterPool
from pipeline.queue.gateway_keys import GatewayKey, gateway_key_of
from pipeline.queue.journal_frames import has_journal, read_journal
from pipeline.queue.payloads import open_payloads
from pipeline.redaction import NOTHING, Redactor
from pipeline.settings import Settings
from pipeline.settings.sections import LlmSettings
from workers.core.base_agent import BaseAgent
from workers.core.endpoint import Endpoint
from workers.core.registry import get_agent_class
from workers.core.tools_config import create_tools
from workers.llm.call_limits import CallLimiter
from workers.llm.chat_client import KIND_FIELDS, ServerKind
from workers.llm.replicas import Replicas, ReplicatedClient
from workers.llm.server_kind import ServerKinds
from workers.process.activity import Activity, WatchTry
from workers.process.agent_timeout import off_the_clock
from workers.process.asked_options import require_options
from workers.process.attempt import Attempt
from workers.process.call_warnings import CallWarnings
from workers.process.endpoints import allowed_endpoints
from workers.process.in_flight import InFlight
from workers.process.isolation import Isolation
from workers.process.journal import NOTHING_RECORDED, Journal, MakeFrame, fresh_enough
from workers.process.model_calls import ModelCalls, ModelClient
from workers.process.policies import Policies, PolicyClient
from workers.process.remote_session import RemoteSessions
from workers.process.unclocked_limiter import UnclockedLimiter
from workers.process.worker_gateway import WorkerGateway
from workers.rewards.registry import get_reward
from workers.tools.mcp_servers import MCP_PREFIX, MCPServerError, MCPServers

if TYPE_CHECKING:
    from workers.llm.chat_client import ChatClient

log = logging.getLogger(__name__)

#: Agent configurations and clients that are cached; a worker serves few runs at a time.
_MAX_AGENTS = 64


MakeClient = Callable[[str, LlmSettings, CallLimiter, WatchTry, TokenWish], ModelClient]


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
        self.mcp = MCPServers(
            {name: server.arguments() for name, server in settings.worker.mcp.items()}
        )
        self._keep = keep
        self._make_client = make_client or partial(_make_client, ServerKinds())
        self._limits = limits or LocalPauses()
        self.remote_sessions = RemoteSessions(settings, self._limits)
        self._agents: dict[bytes, BaseAgent] = {}
        self._replicas = Replicas()
        self._clients: dict[tuple[str, str, str, float], ModelClient] = {}

    async def agent_for(self, request: RolloutRequest) -> BaseAgent:
        """Return the agent a request names, with its tools; shared by equal requests of a run.

        Raises:
            ValueError: An unknown agent, tool or MCP server.
            SandboxError: An MCP server could not be opened.
            ContractError: An unknown reward, or an unknown option or one of a wrong type.
        """
        key = orjson.dumps(
            [
                request.run_id.hex,  # An agent reports what is wrong with it once for each run.
                request.agent,
                request.agent_config,
                request.tools,
                request.tools_config,
                request.reward,
                request.reward_config,
                request.limits.max_steps,
                request.limits.max_tokens,
            ],
            option=orjson.OPT_SORT_KEYS,
        )
        remote = await self._remote_tools(request)
        agent = self._agents.get(key)
        if agent is None:
            if len(self._agents) >= _MAX_AGENTS:
                self._agents.clear()
            agent = self._agents[key] = _make_agent(request, remote)
        return agent

    async def _remote_tools(self, request: RolloutRequest) -> Mapping[str, Any]:
        names = [name.removeprefix(MCP_PREFIX) for name in request.tools if _is_remote(name)]
        try:
            return await self.mcp.tools(names)
        except MCPServerError as error:
            raise SandboxError(str(error), code="mcp_server") from error

    async def open_journal(self, request: RolloutRequest) -> Journal:
        """Return the journal of an attempt, with what earlier attempts recorded.

        Left out are calls whose weights are staler than the run allows, because their group would
        be dropped, and a journal that cannot be read: the attempt then makes these calls itself.
        """
        recorded = NOTHING_RECORDED
        if has_journal(request):
            try:
                recorded = await asyncio.to_thread(
                    lambda: read_journal(request, open_payloads(self.settings))
                )
                recorded = fresh_enough(recorded, self._oldest_version(request))
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
        request, llm = attempt.request, self.settings.llm
        model = request.model or llm.model or "default"
        self.policies.learn((request.policy,))

        def client_of(endpoints: tuple[str, ...]) -> ModelClient:
            urls = allowed_endpoints(endpoints or request.base_url, self.settings)
            return self._client_of(urls, model, request)

        client = PolicyClient(
            self.policies.of(request.run_id),
            client_of,
            pause_wait_s=self.settings.worker.policy_pause_wait_s,
        )
        overrides = request.own_sampling
        defaults: dict[str, Any] = {}
        if llm.tag_requests:
            label = label_of(request.run, request.group_no, request.rollout_index, 1)
            defaults["user"] = label.rpartition("-a")[0]

        return ModelCalls(
            client,
            model=model,
            defaults=defaults,
            overrides=overrides,
            tokens=request.tokens,
            serve=partial(self._serving, request, model),
            journal=attempt.journal,
        )

    def _serving(
        self,
        request: RolloutRequest,
        model: str,
        generate: Callable[..., Any],
        *,
        with_socket: bool,
    ) -> AbstractAsyncContextManager[Endpoint]:
        # The key is made here, because few agents ask for an endpoint.
        key = gateway_key_of(request, model)
        return self.gateway.serving(key, generate, with_socket=with_socket)

    def calls_of_key(self, key: GatewayKey) -> ModelCalls:
        """Return the model calls of an attempt that runs elsewhere.

        Raises:
            ModelBadRequest: No endpoint is named, or this process may not call it.
        """
        urls = allowed_endpoints(key.base_url, self.settings)
        return ModelCalls(
            self._client_of(urls, key.model, key),
            model=key.model,
            defaults={"user": key.label.rpartition("-a")[0]}
            if self.settings.llm.tag_requests
            else {},
            overrides=key.sampling,
            tokens=key.tokens,
        )

    def _client_of(
        self, urls: tuple[str, ...], model: str, request: RolloutRequest | GatewayKey
    ) -> ModelClient:
        clients = {url: self._client(url, model, request) for url in urls}
        if len(clients) == 1:
            return clients[urls[0]]
        # One per attempt: its calls stay on one replica while that is possible.
        return ReplicatedClient(self._replicas, cast("dict[str, ChatClient]", clients))

    def _client(
        self, base_url: str, model: str, request: RolloutRequest | GatewayKey
    ) -> ModelClient:
        # Clients share connections, so they are cheap. Each has the limiter of one run.
        key = (base_url, model, request.run, request.weight)
        client = self._clients.get(key)
        if client is None:
            if len(self._clients) >= _MAX_AGENTS:
                self._clients.clear()
            limiter = UnclockedLimiter(
                self._limits.for_run(base_url, model, run=request.run, weight=request.weight)
            )
            watch = self.activity.watcher(request.run_id, base_url, model)
            client = self._make_client(base_url, self.settings.llm, limiter, watch, request.tokens)
            self._clients[key] = client
        return client


def open_limits(settings: Settings, process: str) -> LimiterPool | LocalPauses:
    """Return the limits that this process shares with others; without a Redis its own pauses."""
    url = settings.limits_redis_url
    if url is None:
        return LocalPauses()
    return LimiterPool(url, prefix=settings.limits_prefix, process=process)


def _is_remote(tool: str) -> bool:
    return tool.startswith(MCP_PREFIX)


def _make_agent(request: RolloutRequest, remote: Mapping[str, Any]) -> BaseAgent:
    if request.reward is not None:
        # Raises for an unknown reward before any model call is made.
        get_reward(request.reward)
    require_options(request)
    agent_class: Any = get_agent_class(request.agent)
    options: dict[str, Any] = {"max_tokens_per_step": request.limits.max_tokens}
    if request.limits.max_steps is not None:
        options["max_steps"] = request.limits.max_steps
    options |= request.agent_config
    agent: BaseAgent = agent_class(**options)
    if request.tools:
        asked = {name: request.tools_config.get(name) for name in request.tools}
        local = {name: config for name, config in asked.items() if not _is_remote(name)}
        if doubled := local.keys() & remote.keys():
            raise ValueError(
                f"A tool of an MCP server is named {min(doubled)!r}, as another tool of the run: "
                "give the server a name_prefix."
            )
        agent.set_tools({**create_tools(local, in_sandbox=True), **remote})
    return agent


def _make_client(
    kinds: ServerKinds,
    base_url: str,
    llm: LlmSettings,
    limiter: CallLimiter,
    watch: WatchTry,
    tokens: TokenWish,
) -> ModelClient:
    from workers.llm.call_retries import CallRetries, CallRetryPolicy
    from workers.llm.providers import find_provider, make_client

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
    return None if kind is None else KIND_FIELDS[cast("ServerKind", kind)]
