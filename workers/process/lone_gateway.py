"""The gateway as a process of its own, for agents on other machines.

Run by `rollout gateway`. A key says how its attempt's model is called, so the process keeps nothing
but the answers for repeated requests, and any number can run. Must not: serve without a signing
key, or outlive a stop by more than `DRAIN_S`.
"""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from collections.abc import Callable
from contextvars import copy_context

from aiohttp import web

from pipeline.contract.errors import ConfigError, RolloutError
from pipeline.queue.gateway_keys import GatewayKeys
from pipeline.redaction import Redactor, redact_logs
from pipeline.service import process_id
from pipeline.settings import Settings
from workers.gateway.rejections import rejection_of
from workers.gateway.server import ServedAttempt, make_gateway_app
from workers.llm.connections import close_connections
from workers.process.loop import new_loop
from workers.process.runtime import Runtime, open_limits
from workers.process.unclocked_limiter import bounded_waits
from workers.process.worker_gateway import read_key

#: Time for calls under way after a stop.
DRAIN_S = 30.0
#: Attempts whose answers are kept for repeated requests.
_REMEMBERED = 1000


class LoneGateway:
    """Serves every attempt whose key is signed by this deployment.

    Args:
        settings: The signing key, the model's endpoints and the section `gateway`.
        runtime: Makes the model calls.

    Raises:
        ConfigError: There is no signing key.
    """

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        secret = settings.broker.signing_key
        if secret is None:
            raise ConfigError(
                "A gateway of its own needs the deployment's signing key.",
                why="Without it anybody could write a key.",
                remedy="Set ROLLOUT_BROKER__SIGNING_KEY as for the workers.",
            )
        self._settings = settings.gateway
        self._runtime = runtime
        self._keys = GatewayKeys(secret.get_secret_value().encode())
        self._attempts: OrderedDict[str, ServedAttempt] = OrderedDict()

    def app(self) -> web.Application:
        """Return the application."""
        return make_gateway_app(self._find_attempt, max_body_bytes=self._settings.max_body_bytes)

    def _find_attempt(self, text: str) -> ServedAttempt:
        key = read_key(self._keys, text)
        served = self._attempts.get(text)
        if served is None:
            try:
                calls = self._runtime.calls_of_key(key)
            except RolloutError as error:
                raise rejection_of(error) from error
            with bounded_waits(self._settings.limit_wait_s):
                served = ServedAttempt(key.label, key.model, calls.generate, copy_context())
            self._attempts[text] = served
            if len(self._attempts) > _REMEMBERED:
                self._attempts.popitem(last=False)
        self._attempts.move_to_end(text)
        return served


def run_gateway(
    settings: Settings, host: str, port: int, *, ready: Callable[[str], None] = lambda _: None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: As in `LoneGateway`.
        host: Address to listen on.
        port: 0 takes a free one.
        ready: Called with the base URL, with `/v1`, when calls are answered.

    Raises:
        ConfigError: There is no signing key, or the address cannot be listened on.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(settings, host, port, ready))


async def _serve(settings: Settings, host: str, port: int, ready: Callable[[str], None]) -> None:
    redactor = Redactor.of(settings, {})
    redact_logs(redactor)
    name = process_id("gateway")
    limits = open_limits(settings, name)
    runtime = Runtime(settings, name, limits=limits, redactor=redactor)
    runner = web.AppRunner(
        LoneGateway(settings, runtime).app(), access_log=None, shutdown_timeout=DRAIN_S
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await runner.setup()
    try:
        await _listen(runner, host, port)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{runner.addresses[0][1]}/v1")
        await stopped.wait()
    finally:
        await runner.cleanup()
        await limits.close()
        await close_connections()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        raise ConfigError(
            f"The gateway cannot listen on {host}:{port}.",
            why=f"{error.strerror}.",
            remedy="Choose another --host or --port; port 0 takes a free one.",
        ) from error
