"""The execution of an attempt by a remote session: invoke it, then hand the attempt over.

Called by `execute`. The task ends here; the session's result reaches the store by SQS and S3
(`pipeline/agentcore`). Must not: wait for the result.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pipeline.agentcore.call_pace import CallPace, require_shared_pace
from pipeline.agentcore.data_plane import DataPlane
from pipeline.contract.agentcore import payload_of, session_id_of
from pipeline.contract.base_urls import urls_of
from pipeline.contract.errors import ConfigError, ContractError, ModelRateLimit, SandboxError
from pipeline.contract.messages import Completion, RolloutRequest
from pipeline.limits.local_pause import LocalPauses
from pipeline.limits.pool import LimiterPool
from pipeline.queue.gateway_keys import GatewayKeys, gateway_key_of
from pipeline.settings import Settings
from workers.process.attempt import Attempt
from workers.process.endpoints import require_allowed_target

#: Tries of one invocation: a container that is starting rejects the first ones. All tries name the
#: same session, and its app runs a rollout once.
_TRIES, _FIRST_WAIT_S = 3, 1.0


class RemoteSessions:
    """Invokes sessions for the attempts of a worker.

    Args:
        settings: The rate that all processes keep.
        limits: This worker's connection to the shared limits.
    """

    def __init__(self, settings: Settings, limits: LimiterPool | LocalPauses) -> None:
        self._settings = settings
        self._limits = limits
        self._plane = DataPlane()
        self._pace: CallPace | None = None

    async def start(self, attempt: Attempt) -> Completion:
        """Invoke the attempt's session; return the message that hands the attempt over.

        Raises:
            RolloutError: The session did not start.
        """
        request = attempt.request
        target = request.agentcore
        assert target is not None
        require_allowed_target(target, self._settings)
        pace = self._shared_pace()
        attempt.enter("generating")
        await self._plane.prepare(target)
        session_id = session_id_of(request.label, request.rollout_id)
        payload = payload_of(
            target,
            run=request.run,
            group_no=request.group_no,
            session_id=session_id,
            prompt=request.prompt,
            model=self._model_of(request),
            reward=request.reward,
        )
        for number in range(1, _TRIES + 1):
            await pace.wait(target, run=request.run, weight=request.weight)
            try:
                await self._plane.invoke(target, session_id, payload)
                break
            except ModelRateLimit:
                await pace.note_throttled(target)
                raise
            except SandboxError:
                if number == _TRIES:
                    raise
                await asyncio.sleep(_FIRST_WAIT_S * 2 ** (number - 1))
        return Completion(
            **request.identity,
            worker_id=attempt.worker_id,
            purpose="handover",
            outcome="succeeded",
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._plane.close()

    def _shared_pace(self) -> CallPace:
        if self._pace is None:
            try:
                require_shared_pace(self._settings)
            except ConfigError as error:
                raise ContractError(str(error), code=error.code) from error
            assert isinstance(self._limits, LimiterPool)
            self._pace = CallPace(self._limits, self._settings.agentcore.requests_per_second)
        return self._pace

    def _model_of(self, request: RolloutRequest) -> dict[str, Any]:
        """Return the run's model as `_rollout` carries it, behind the gateway if one is set."""
        settings = self._settings
        name, urls = request.model, urls_of(request.base_url)
        model: dict[str, Any] = {}
        if (gateway := settings.agentcore.gateway_url) is not None:
            secret = settings.broker.signing_key
            if secret is None:
                raise ContractError(
                    "agentcore.gateway_url needs the signing key of the deployment: a gateway "
                    "accepts no other keys. Set ROLLOUT_BROKER__SIGNING_KEY for all processes.",
                    code="no_signing_key",
                )
            name = name or settings.llm.model or "default"
            expires_at = int(time.time() + settings.gateway.key_lifetime_s)
            keys = GatewayKeys(secret.get_secret_value().encode())
            model["base_url"] = gateway.get_secret_value()
            model["api_key"] = keys.write(gateway_key_of(request, name, expires_at=expires_at))
        elif urls:
            # One of several replicas; the rollouts of a group are spread over them.
            model["base_url"] = urls[request.rollout_index % len(urls)]
        if name:
            model["model_id"] = name
        if request.sampling:
            model["sampling_params"] = request.own_sampling
        return model
