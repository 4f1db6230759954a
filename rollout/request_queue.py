"""Chooses the request queue of a run, and checks that its workers may call the run's endpoint.

The endpoint is the model's, or the container of a remote agent. `run`, `resume` and `submit` use
this module. All workers of a queue must be able to run all its requests, so a run with its own
plug-ins or endpoint gets a queue of its own. Must not: start a process.
"""

from __future__ import annotations

from pipeline.contract.base_urls import may_call
from pipeline.contract.errors import NotAllowed
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, RunConfig, own_queue_of
from pipeline.store.processes import Process, list_processes
from rollout.deployment import Deployment
from rollout.options import WorkerOptions

E_WORKERS_REFUSE = "E134"


def request_queue(
    deployment: Deployment, config: RunConfig, local: WorkerOptions, *, slug: str
) -> str:
    """Return a queue for this run alone if other workers could not run its requests."""
    if config.queue != DEFAULT_REQUEST_QUEUE:
        return config.queue
    settings = deployment.settings
    usual = (*settings.llm.base_urls, *settings.worker.allowed_urls)
    is_usual = not local.plugin and all(may_call(url, usual) for url in config.called_urls)
    return config.queue if is_usual and not _refusing(deployment, config) else own_queue_of(slug)


def require_allowed_endpoint(deployment: Deployment, config: RunConfig) -> None:
    """Check that every worker on the run's queue may call the run's endpoints.

    Raises:
        NotAllowed: A worker reports that it may not; all its rollouts would fail.
    """
    refusing = _refusing(deployment, config)
    if not refusing:
        return
    process, url = refusing[0]
    known = ", ".join(process.base_urls) or "none"
    raise NotAllowed(
        f"{len(refusing)} of the workers on queue {config.queue} may not call {url}.",
        why=f"{process.process_id} may call those on loopback, and: {known}.",
        remedy="Set OPENAI_BASE_URL or ROLLOUT_WORKER__ALLOWED_BASE_URLS for these workers and "
        "start them again, or give the run a queue of other workers with --queue.",
        code=E_WORKERS_REFUSE,
    )


def _refusing(deployment: Deployment, config: RunConfig) -> list[tuple[Process, str]]:
    """Return live workers on the run's queue, each with the endpoint that it may not call."""
    refusing: list[tuple[Process, str]] = []
    for process in deployment.transact(list_processes):
        if config.queue in process.queues and not process.stopping:
            refused = [u for u in config.called_urls if not may_call(u, process.base_urls)]
            refusing += [(process, url) for url in refused[:1]]
    return refusing
