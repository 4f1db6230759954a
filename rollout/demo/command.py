"""`rollout demo`: the whole way of a rollout on a bare machine, in half a minute.

Private servers, a controller, a worker and the offline policy in a temporary folder; afterwards
nothing of it is left. Looks at no settings of the user.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.contract.errors import PipelineError, ServiceUnavailable
from rollout.child_processes import Child, Children
from rollout.demo.summary import print_summary, summary_json
from rollout.deployment import Deployment, engine_of
from rollout.local_processes import LocalProcesses
from rollout.options import Json, WorkerOptions
from rollout.output import note, print_json
from rollout.progress import wait_for_run

if TYPE_CHECKING:
    from pipeline.embedded import EmbeddedServices
    from pipeline.settings import Settings
    from pipeline.store.runs import Run
    from pipeline.store.status import RunStatus

SLUG = "demo"
POLICY = "offline-policy"

_POLICY_START_S = 20.0
_WAIT_S = 120.0
_CHILDREN_END_S = 10.0
#: The stand-in's mistakes: enough for every kind of trouble to be seen.
_POLICY_OPTIONS = ("--wrong", "0.2", "--mishaps", "0.25", "--stall-s", "2")


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=5000, help="Arithmetic prompts.")] = 64,
    n: Annotated[int, typer.Option("-n", min=1, max=64, help="Rollouts of each prompt.")] = 4,
    as_json: Json = False,
) -> None:
    """Watch 64 prompts run, 4 rollouts each, with no model.

    A stand-in server answers instead of a model; private servers are started for it, and everything
    is gone at the end.
    """
    _interrupt_on_signals()
    started = time.monotonic()
    with _temporary_deployment() as deployment:
        settings = deployment.settings
        processes = LocalProcesses(
            settings, _child_settings(), folder=settings.data_dir, only_environment=True
        )
        try:
            policy = processes.spawn_other(POLICY, [POLICY, *_POLICY_OPTIONS])
            processes.start(workers=1, options=WorkerOptions(concurrency=64))
            base_url = _wait_ready(policy, processes)
            note(f"The offline policy, a stand-in for a model, plays at {base_url}.")
            run = _enqueue(deployment, base_url, prompts=prompts, n=n)
            final = wait_for_run(deployment, run, check=processes.check, timeout_s=_WAIT_S)
            batch = _pull(deployment, groups=min(4, prompts))
            if as_json:
                print_json(summary_json(deployment, run, final))
            else:
                print_summary(deployment, run, final, batch)
            _require_success(final)
        finally:
            processes.stop()
    note(f"Nothing of it is left. It took {time.monotonic() - started:.1f} s.")


def _require_success(final: RunStatus) -> None:
    """Fail where the machine, not the script, made most rollouts fail."""
    failed, total = final.rollouts["failed"], final.rollouts["total"]
    if failed * 2 > total:
        raise PipelineError(
            f"The demo went wrong: {failed} of {total} rollouts failed.",
            why=f"Error classes: {', '.join(final.errors)}.",
            remedy="Look at the examples above, and see: rollout doctor",
            code="E150",
        )


@contextmanager
def _temporary_deployment() -> Iterator[Deployment]:
    """Open a store and a broker of its own, and remove them with everything in them."""
    from pipeline.embedded import EmbeddedServices
    from pipeline.store import schema

    folder = Path(tempfile.mkdtemp(prefix="rollout-demo-"))
    # Root's Postgres runs as another account, which must be able to pass through.
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    services = EmbeddedServices(folder / "data", durable=False)
    tell_ended = _remove_if_killed(services, folder)
    try:
        note("Starting private Postgres and Redis servers …")
        settings = _settings(folder / "data", services.start_postgres(), services.start_redis())
        engine = engine_of(settings)
        try:
            schema.upgrade(engine)
            yield Deployment(settings, engine)
        finally:
            engine.dispose()
    finally:
        _ignore_signals()
        note("Stopping and removing everything …")
        services.remove()
        shutil.rmtree(folder, ignore_errors=True)
        tell_ended()


def _remove_if_killed(services: EmbeddedServices, folder: Path) -> Callable[[], None]:
    """Have a fork clean up where we no longer can; return what tells it that we did.

    It waits on a pipe that the kernel closes when we end.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _wait_and_remove(reader, writer, services, folder)
        finally:
            os._exit(0)
    os.close(reader)

    def tell_ended() -> None:
        os.write(writer, b"1")
        os.close(writer)
        os.waitpid(pid, 0)

    return tell_ended


def _wait_and_remove(reader: int, writer: int, services: EmbeddedServices, folder: Path) -> None:
    _ignore_signals()
    os.setsid()
    os.close(writer)
    with open(os.devnull, "r+b") as nothing:
        for descriptor in range(3):
            os.dup2(nothing.fileno(), descriptor)
    if os.read(reader, 1):
        return
    children = Children(folder / "data")
    children.stop(children.find(), timeout_s=_CHILDREN_END_S)
    services.remove()
    shutil.rmtree(folder, ignore_errors=True)


def _settings(data_dir: Path, database_url: str, broker_url: str) -> Settings:
    from pydantic import SecretStr

    from pipeline.settings import Settings
    from pipeline.settings.sections import BrokerSettings, DatabaseSettings, WorkerSettings

    return Settings.model_construct(
        **{
            **{name: field.default for name, field in Settings.model_fields.items()},
            "data_dir": data_dir,
            "database": DatabaseSettings(url=SecretStr(database_url)),
            "broker": BrokerSettings(url=SecretStr(broker_url)),
            "worker": WorkerSettings(drain_s=1.0),
            "log_level": "WARNING",
        }
    )


def _child_settings() -> dict[str, str]:
    return {
        "ROLLOUT_WORKER__DRAIN_S": "1",
        # A call that fails is not tried again at once: the attempt is, so that it can be seen.
        "ROLLOUT_LLM__MAX_RETRIES": "0",
        "ROLLOUT_LLM__TIMEOUT_S": "1.5",
    }


def _wait_ready(policy: Child, processes: LocalProcesses) -> str:
    """Return the base URL that the offline policy tells in its first line."""
    deadline = time.monotonic() + _POLICY_START_S
    while time.monotonic() < deadline:
        for line in Path(policy.log).read_text().splitlines():
            if line.startswith('{"ready"'):
                return json.loads(line)["base_url"]
        processes.check()
        time.sleep(0.05)
    raise ServiceUnavailable(
        f"The offline policy did not start within {_POLICY_START_S:g} s.",
        remedy="Try again on a machine that is less busy.",
    )


def _enqueue(deployment: Deployment, base_url: str, *, prompts: int, n: int) -> Run:
    from pipeline.contract.run import RunConfig
    from pipeline.store.prompts import PromptSource
    from producers.datasets import Prompt
    from producers.demo_prompts import demo_prompts
    from producers.enqueue import enqueue

    config = RunConfig(
        agent="react",
        tools=("calculator",),
        reward="numeric",
        model=POLICY,
        base_url=base_url,
        sampling={"seed": 0},
        n=n,
        max_attempts=3,
        max_error_rate=1.0,  # the demo has a verdict of its own
        backoff_base_s=0.2,
    )
    rows = (
        Prompt(row_no, {"content": row["question"], "answer": row["answer"]})
        for row_no, row in enumerate(demo_prompts(prompts))
    )
    source = PromptSource("arithmetic")
    report = enqueue(deployment.engine, run=SLUG, config=config, source=source, prompts=rows)
    note(f"Enqueued {report.prompts} prompts, {report.rollouts} rollouts.")
    return report.run


def _pull(deployment: Deployment, *, groups: int) -> Any:
    from pipeline.contract.train_batch import BatchSpec, NotReady
    from pipeline.queue.payloads import open_payloads
    from pipeline.trainer.client import TrainerClient

    client = TrainerClient(
        deployment.engine,
        run=SLUG,
        consumer="demo-trainer",
        payloads=open_payloads(deployment.settings),
    )
    try:
        return client.pull(0, BatchSpec(groups=groups))
    except NotReady:
        return None


def _interrupt_on_signals() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def _ignore_signals() -> None:
    """Let nothing interrupt the cleaning up, which takes a second or two."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
