"""Which workers may run a run: the queue of a local one, and who would refuse its endpoint.

Used by `run`, `resume` and `submit`. Workers of one queue must all be able to run what is on it: a
plug-in or an endpoint that only one command names would be unknown to the others. Must not: start
anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.contract.base_urls import may_call, urls_of
from pipeline.contract.errors import NotAllowed, NotFound

if TYPE_CHECKING:
    from pipeline.contract.run import RunConfig
    from pipeline.store.processes import Process
    from pipeline.store.runs import Run
    from rollout.deployment import Deployment
    from rollout.options import WorkerOptions

E_WORKERS_REFUSE = "E134"


def request_queue(
    deployment: Deployment, config: RunConfig, local: WorkerOptions, *, slug: str
) -> str:
    """Return the run's own queue where other workers could not run what this command asks for."""
    from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, own_queue_of

    if config.queue != DEFAULT_REQUEST_QUEUE:
        return config.queue
    settings = deployment.settings
    usual = (*urls_of(settings.llm.base_url), *settings.worker.allowed_base_urls)
    is_usual = not local.plugin and all(may_call(url, usual) for url in urls_of(config.base_url))
    return config.queue if is_usual and not _refusing(deployment, config) else own_queue_of(slug)


def require_allowed_endpoint(deployment: Deployment, config: RunConfig) -> None:
    """Check that no worker on the run's queue would refuse the run's endpoints.

    Raises:
        NotAllowed: One reports that it may not call them; every rollout that it took would fail.
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


def stored_run(deployment: Deployment, slug: str) -> Run | None:
    """Return the run of exactly this name, None if there is none."""
    from pipeline.store.runs import get_run

    try:
        found = deployment.transact(lambda connection: get_run(connection, slug))
    except NotFound:
        return None
    return found if found.slug == slug else None


def _refusing(deployment: Deployment, config: RunConfig) -> list[tuple[Process, str]]:
    """Return the live workers on the run's queue that may not call its endpoints, and which."""
    from pipeline.store.processes import list_processes

    refusing: list[tuple[Process, str]] = []
    for process in deployment.transact(list_processes):
        if config.queue in process.queues and not process.stopping:
            urls = urls_of(config.base_url)
            refused = [url for url in urls if not may_call(url, process.base_urls)]
            refusing += [(process, url) for url in refused[:1]]
    return refusing
