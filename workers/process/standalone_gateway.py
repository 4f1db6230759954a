"""The gateway as a process of its own, for agents on other machines.

Run by `rollout gateway`. A key holds the endpoint and parameters of its attempt's model calls, and
the record of each call goes to the collector before its answer. So the process keeps only the
answers for repeated requests, and any number of gateways can run. Must not: serve without a signing
key, or outlive a stop by more than `DRAIN_S` and one message to the broker.
"""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from collections.abc import Callable
from contextvars import copy_context
from uuid import UUID

from aiohttp import web

from pipeline.contract.errors import ConfigError, RolloutError
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import OutcomePublisher
from pipeline.queue.gateway_keys import GatewayKey, GatewayKeys
from pipeline.redaction import Redactor, redact_logs
from pipeline.service import process_id
from pipeline.settings import Settings
from pipeline.settings.sections import GatewaySettings
from workers.gateway.rejections import attempt_over, rejection_of
from workers.gateway.server import ServedAttempt, make_gateway_app
from workers.process.call_recorder import AttemptRecord, CallRecorder
from workers.process.loop import new_loop
from workers.process.runtime import Runtime, open_limits
from workers.process.unclocked_limiter import bounded_waits
from workers.process.worker_gateway import read_key

#: Time for calls under way after a stop, and for records that wait for the broker.
DRAIN_S = 30.0
_FLUSH_S = 5.0
#: Attempts whose answers are kept for repeated requests.
_REMEMBERED = 1000


class StandaloneGateway:
    """Serves every attempt whose key is signed by this deployment.

    Args:
        keys: Reads the keys of the deployment.
        settings: The section `gateway`.
        runtime: Makes the model calls.
        recorder: Records them.
    """

    def __init__(
        self, keys: GatewayKeys, settings: GatewaySettings, runtime: Runtime, recorder: CallRecorder
    ) -> None:
        self._keys = keys
        self._settings = settings
        self._runtime = runtime
        self._recorder = recorder
        #: The newest attempt of each rollout that was seen here.
        self._attempts: OrderedDict[UUID, tuple[int, ServedAttempt]] = OrderedDict()

    def app(self) -> web.Application:
        """Return the application."""
        return make_gateway_app(self._find_attempt, max_body_bytes=self._settings.max_body_bytes)

    def _find_attempt(self, text: str) -> ServedAttempt:
        key = read_key(self._keys, text)
        newest, served = self._attempts.get(key.rollout_id, (0, None))
        if key.attempt_no < newest:
            raise attempt_over(key.label)
        if served is None or key.attempt_no > newest:
            replaced, served = served, self._served(key)
            self._attempts[key.rollout_id] = (key.attempt_no, served)
            if replaced is not None:
                replaced.close()
            if len(self._attempts) > _REMEMBERED:
                self._attempts.popitem(last=False)
        self._attempts.move_to_end(key.rollout_id)
        return served

    def _served(self, key: GatewayKey) -> ServedAttempt:
        try:
            calls = self._runtime.calls_of_key(key)
        except RolloutError as error:
            raise rejection_of(error) from error
        record = AttemptRecord(key, calls, self._recorder, self._runtime.redactor)
        with bounded_waits(self._settings.limit_wait_s):
            context = copy_context()
        return ServedAttempt(key.label, key.model, calls.generate, context, record.recorded)


def deployment_keys(settings: Settings) -> GatewayKeys:
    """Return the keys that gateways of this deployment accept.

    Raises:
        ConfigError: There is no signing key.
    """
    secret = settings.broker.signing_key
    if secret is None:
        raise ConfigError(
            "A gateway of its own needs the deployment's signing key.",
            why="Without a signing key every client could write gateway keys.",
            remedy="Set ROLLOUT_BROKER__SIGNING_KEY as for the workers.",
        )
    return GatewayKeys(secret.get_secret_value().encode())


def run_gateway(
    settings: Settings,
    keys: GatewayKeys,
    host: str,
    port: int,
    *,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: The broker, the payload store, the model's endpoints, the limits and the section
            `gateway`.
        keys: From `deployment_keys`.
        host: Address to listen on.
        port: 0 takes a free one.
        ready: Called with the base URL, with `/v1`, when calls are answered.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(settings, keys, host, port, ready))


async def _serve(
    settings: Settings, keys: GatewayKeys, host: str, port: int, ready: Callable[[str], None]
) -> None:
    redactor = Redactor.of(settings, {})
    redact_logs(redactor)
    name = process_id("gateway")
    runtime = Runtime(settings, name, limits=open_limits(settings, name), redactor=redactor)
    recorder = CallRecorder(
        OutcomePublisher(broker_of(settings)),
        runtime.payloads,
        inline_max_bytes=settings.payloads.inline_max_bytes,
    )
    recorder.start()
    gateway = StandaloneGateway(keys, settings.gateway, runtime, recorder)
    runner = web.AppRunner(gateway.app(), access_log=None, shutdown_timeout=DRAIN_S)
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
        # Calls that cannot be recorded are rejected while their clients are still connected.
        recorder.give_up_after(_FLUSH_S)
        await runner.cleanup()
        await asyncio.to_thread(recorder.close)
        await runtime.close()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        raise ConfigError(
            f"The gateway cannot listen on {host}:{port}.",
            why=f"{error.strerror}.",
            remedy="Choose another --host or --port; port 0 takes a free one.",
        ) from error
