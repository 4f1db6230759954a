"""The objects that all attempts of a worker share: agents, model clients, the in-flight list.

Built once by `run_worker`, used by `execution.py`. A base URL that the worker's settings do not
allow is rejected here. Must not: send a key to an endpoint that the key is not configured for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import orjson

from pipeline.contract.base_urls import same_endpoint
from pipeline.contract.errors import ConfigError, ModelBadRequest
from pipeline.contract.messages import RolloutRequest
from pipeline.contract.rollout import label_of
from pipeline.limits.local_pause import LocalPause, LocalPauses
from pipeline.limits.pool import LimiterPool
from pipeline.limits.run_limiter import RunLimiter
from pipeline.redaction import NOTHING, Redactor
from pipeline.settings import Settings
from pipeline.settings.sections import LlmSettings
from workers.core.base_agent import BaseAgent
from workers.core.registry import get_agent_class
from workers.core.tool_registry import get_global_tool_registry
from workers.llm.call_limits import CallLease, CallLimiter
from workers.llm.replicas import Replicas, ReplicatedClient
from workers.process.activity import Activity, WatchTry
from workers.process.agent_timeout import off_the_clock
from workers.process.asked_options import require_options
from workers.process.attempt import Attempt
from workers.process.call_warnings import CallWarnings
from workers.process.endpoints import allowed_endpoints
from workers.process.in_flight import InFlight
from workers.process.isolation import Isolation
from workers.process.model_calls import ModelCalls, ModelClient
from workers.rewards.registry import get_reward

if TYPE_CHECKING:
    from workers.llm.chat_client import ChatClient

#: Agent configurations and clients that are cached; a worker serves few runs at a time.
_MAX_AGENTS = 64


MakeClient = Callable[[str, LlmSettings, CallLimiter, WatchTry], ModelClient]


class UnclockedLimiter:
    """A run's limiter; its waits do not count against the attempt's wall clock."""

    def __init__(self, limiter: RunLimiter | LocalPause) -> None:
        self._limiter = limiter
        self.note_rate_limited = limiter.note_rate_limited

    async def acquire(self, estimated_tokens: int) -> CallLease:
        """Wait until the limits allow a call of about this many tokens."""
        lease = self._limiter.acquire_at_once(estimated_tokens)
        return lease or await off_the_clock(self._limiter.acquire(estimated_tokens))


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
    ) -> None:
        self.redactor = redactor
        self.settings = settings
        self.worker_id = worker_id
        self.in_flight = InFlight()
        self.activity = activity or Activity(
            CallWarnings(f"Each call is tried again up to {settings.llm.max_retries} times."),
            redactor=redactor,
        )
        #: None: this process runs every attempt itself.
        self.isolation = (
            Isolation(settings, worker_id, self.in_flight, self.activity) if isolates else None
        )
        self._make_client = make_client or _make_client
        self._limits = limits or LocalPauses()
        self._agents: dict[bytes, BaseAgent] = {}
        self._replicas = Replicas()
        self._clients: dict[tuple[str, str, str, float], ModelClient] = {}

    def agent_for(self, request: RolloutRequest) -> BaseAgent:
        """Return the agent a request names, with its tools; shared by equal requests.

        Raises:
            ValueError: An unknown agent or tool.
            ContractError: An unknown reward, or an unknown option or one of a wrong type.
        """
        key = orjson.dumps(
            [
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
        agent = self._agents.get(key)
        if agent is None:
            if len(self._agents) >= _MAX_AGENTS:
                self._agents.clear()
            agent = self._agents[key] = _make_agent(request)
        return agent

    def model_calls(self, attempt: Attempt) -> ModelCalls:
        """Return the object through which one attempt calls its model.

        Raises:
            ModelBadRequest: No endpoint is named, or this worker may not call it.
        """
        request, llm = attempt.request, self.settings.llm
        model = request.model or llm.model or "default"
        client = self._client_of(allowed_endpoints(request.base_url, self.settings), model, request)
        overrides = dict(request.sampling)
        if "seed" in overrides:
            # Rollouts of a group must differ; another attempt of a rollout gets the same seed.
            overrides["seed"] = int(overrides["seed"]) + request.rollout_index
        defaults: dict[str, Any] = {}
        if llm.tag_requests:
            label = label_of(request.run, request.group_no, request.rollout_index, 1)
            defaults["user"] = label.rpartition("-a")[0]

        def note_call(number: int) -> None:
            attempt.step = number

        return ModelCalls(
            client,
            model=model,
            defaults=defaults,
            overrides=overrides,
            on_call=note_call,
        )

    def _client_of(self, urls: tuple[str, ...], model: str, request: RolloutRequest) -> ModelClient:
        clients = {url: self._client(url, model, request) for url in urls}
        if len(clients) == 1:
            return clients[urls[0]]
        # One per attempt: its calls stay on one replica while that is possible.
        return ReplicatedClient(self._replicas, cast("dict[str, ChatClient]", clients))

    def _client(self, base_url: str, model: str, request: RolloutRequest) -> ModelClient:
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
            client = self._make_client(base_url, self.settings.llm, limiter, watch)
            self._clients[key] = client
        return client


def open_limits(settings: Settings, process: str) -> LimiterPool | LocalPauses:
    """Return the limits that this process shares with others; without a Redis its own pauses."""
    url = settings.limits_redis_url
    if url is None:
        return LocalPauses()
    return LimiterPool(url, prefix=settings.limits_prefix, process=process)


def _make_agent(request: RolloutRequest) -> BaseAgent:
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
    registry = get_global_tool_registry()
    if request.tools:
        agent.set_tools(
            {
                name: registry.get_tool(name, request.tools_config.get(name))
                for name in request.tools
            }
        )
    return agent


def _make_client(
    base_url: str, llm: LlmSettings, limiter: CallLimiter, watch: WatchTry
) -> ModelClient:
    from workers.llm.call_retries import CallRetries, CallRetryPolicy
    from workers.llm.providers import make_client

    key = None
    if any(same_endpoint(base_url, own) for own in llm.base_urls):
        key = llm.api_key
    elif same_endpoint(base_url, llm.anthropic_url):
        key = llm.anthropic_api_key
    try:
        return make_client(
            base_url=base_url,
            api_key=key.get_secret_value() if key else "",
            kind=llm.client,
            timeout_s=llm.timeout_s,
            call_retries=CallRetries(
                CallRetryPolicy(max_retries=llm.max_retries),
                sleep=lambda delay_s: off_the_clock(asyncio.sleep(delay_s)),
            ),
            limiter=limiter,
            watch=watch,
            capture_tokens=llm.capture_tokens,
        )
    except ConfigError as error:
        raise ModelBadRequest(str(error), code="bad_endpoint") from error
