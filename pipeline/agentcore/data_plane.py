"""The calls of a remote agent: invoke a session, stop a session.

Workers invoke, the service in `sessions.py` stops. An ARN goes through boto3, a URL gets a POST.
Each call is made once; its failure is a `RolloutError` that says whether another try may help. Must
not: pace calls, see `call_pace.py`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.errors import ContractError, ModelRateLimit, RolloutError, SandboxError
from pipeline.contract.result_keys import SESSION_HEADER

if TYPE_CHECKING:
    import aiohttp

#: boto3 blocks a thread for each call; a cold start takes seconds.
_MOST_CALLS = 128
#: Longest wait for a container that starts.
_CONNECT_S, _ANSWER_S = 10.0, 120.0
_TEXT_CHARS = 500

#: Errors of AgentCore after which the same call works later.
_RETRYABLE_CODES = frozenset(
    {
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "RetryableConflictException",
        "ServiceQuotaExceededException",
    }
)
_RETRYABLE_STATUSES = frozenset({402, 429})
#: The container failed or is not serving yet.
_CLIENT_ERROR = 424


class SessionMissing(ContractError):
    """There is no such session."""

    code = "no_session"


class DataPlane:
    """Calls of remote agents; belongs to one event loop."""

    def __init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()
        self._http: aiohttp.ClientSession | None = None
        self._threads = ThreadPoolExecutor(_MOST_CALLS, "agentcore")

    async def prepare(self, target: AgentCoreTarget) -> None:
        """Make the client of a target: call it before waiting for the pace.

        A client takes a second to make, and calls that wait for it would then start together.
        """
        if target.region and target.region not in self._clients:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, self._client, target.region)

    async def invoke(
        self, target: AgentCoreTarget, session_id: str, payload: Mapping[str, Any]
    ) -> None:
        """Begin a session; returns when the app has accepted the rollout.

        Raises:
            ModelRateLimit: The service is out of calls or sessions; a later attempt may work.
            SandboxError: The container cannot be reached, or failed; another try may work.
            ContractError: The service refuses the call, or the app is no rollout app.
        """
        body = json.dumps(payload).encode()
        if target.is_arn:
            answer = await self._call(target, "invoke_agent_runtime", session_id, payload=body)
        else:
            answer = await self._post(f"{target.target}/invocations", session_id, body)
        _require_accepted(answer)

    async def stop(self, target: AgentCoreTarget, session_id: str) -> None:
        """Stop a session; a container behind a URL has nothing to stop.

        Raises:
            SessionMissing: It has ended, or never began.
            RolloutError: As for `invoke`.
        """
        if target.is_arn:
            await self._call(target, "stop_runtime_session", session_id)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(
        self, target: AgentCoreTarget, operation: str, session_id: str, **arguments: Any
    ) -> bytes:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        def call() -> bytes:
            reply = getattr(self._client(target.region or ""), operation)(
                agentRuntimeArn=target.target, runtimeSessionId=session_id, **arguments
            )
            return reply["response"].read() if "response" in reply else b""

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except ClientError as error:
            found = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise _failure(status, str(found.get("Code")), str(found.get("Message"))) from error
        except NoCredentialsError as error:
            raise ContractError(f"AWS: {error}.", code="no_credentials") from error
        # OSError and urllib3's errors reach us while a body is read.
        except (BotoCoreError, OSError) as error:
            raise SandboxError(
                f"AgentCore does not answer: {error}", code="session_unreachable"
            ) from error

    def _client(self, region: str) -> Any:
        with self._making:
            if region not in self._clients:
                import boto3
                from botocore.config import Config

                config = Config(
                    retries={"total_max_attempts": 1},
                    max_pool_connections=_MOST_CALLS,
                    connect_timeout=_CONNECT_S,
                    read_timeout=_ANSWER_S,
                )
                self._clients[region] = boto3.client(
                    "bedrock-agentcore", region_name=region, config=config
                )
            return self._clients[region]

    async def _post(self, url: str, session_id: str, body: bytes) -> bytes:
        import aiohttp  # a tenth of a controller's start

        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S)
            self._http = aiohttp.ClientSession(timeout=timeout)
        headers = {SESSION_HEADER: session_id, "Content-Type": "application/json"}
        try:
            # A redirect may lead to an endpoint that this worker may not call.
            async with self._http.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as reply:
                answer = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SandboxError(
                f"{url} does not answer: {type(error).__name__} {error}", code="session_unreachable"
            ) from error
        if reply.status >= 300:
            raise _failure(reply.status, f"HTTP {reply.status}", answer.decode("utf-8", "replace"))
        return answer


def _failure(status: int, code: str, message: str) -> RolloutError:
    text = f"{code}: {message[:_TEXT_CHARS]}"
    if code in _RETRYABLE_CODES or status in _RETRYABLE_STATUSES:
        is_quota = code == "ServiceQuotaExceededException" or status == 402
        return ModelRateLimit(text, code="session_quota" if is_quota else "throttled")
    if code == "ResourceNotFoundException":
        return SessionMissing(text)
    if status >= 500 or status == _CLIENT_ERROR or status == 0:
        return SandboxError(text, code="session_failed")
    return ContractError(text, code="invocation_refused")


def _require_accepted(answer: bytes) -> None:
    """Check that the app works in the background, as a rollout entrypoint does."""
    try:
        status = json.loads(answer).get("status")
    except (ValueError, AttributeError):
        status = None
    if status != "processing":
        text = answer[:_TEXT_CHARS].decode("utf-8", "replace")
        raise ContractError(
            f"The agent answered {text!r} instead of taking the rollout: its entrypoint has no "
            "@app.rollout_entrypoint.",
            code="no_rollout_app",
        )
