"""Which queue the workers of a local run take requests from.

Used by `run` and `resume`. Workers of one queue must all be able to run what is on it: a plug-in or
an endpoint that only this command names would be unknown to the others. Must not: start anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cli.endpoint import is_local
from pipeline.contract.errors import NotFound

if TYPE_CHECKING:
    from pipeline.cli.deployment import Deployment
    from pipeline.cli.options import WorkerOptions
    from pipeline.contract.run import RunConfig
    from pipeline.settings import Settings


def request_queue(settings: Settings, config: RunConfig, local: WorkerOptions, *, slug: str) -> str:
    """Return the run's own queue where other workers could not run what this command asks for."""
    from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, own_queue_of

    url = config.base_url
    usual = (None, settings.llm.base_url, *settings.worker.allowed_base_urls)
    is_usual = not local.plugin and (url in usual or is_local(url))
    is_named = config.queue != DEFAULT_REQUEST_QUEUE
    return config.queue if is_named or is_usual else own_queue_of(slug)


def stored_queue(deployment: Deployment, slug: str) -> str | None:
    """Return the queue of a run that exists, None if it does not: its first call settled it."""
    from pipeline.store.runs import get_run

    try:
        found = deployment.transact(lambda connection: get_run(connection, slug))
    except NotFound:
        return None
    return found.config.queue if found.slug == slug else None
