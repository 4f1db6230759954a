"""The Flower dashboard: a note on every page, and the end of silent workers' tasks.

`dashboard.py` uses it, in Flower's event loop. Must not: query the store or a worker.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tornado.template import BaseLoader

    from pipeline.settings.sections import FlowerSettings

#: Columns of the page of tasks.
COLUMNS = "name,uuid,state,args,result,exception,runtime,worker"
_MAX_TASKS = 50_000
_CHECK_EVERY_S = 1.0

_LOST = "worker_lost: nothing was heard of {} for {:g} s. The run's outcomes: rollout status RUN"


def note_since(started_at: datetime) -> str:
    """Return the note about the contents of the page."""
    return (
        f"Flower shows what workers reported since {started_at:%Y-%m-%d %H:%M:%S} UTC, when it "
        "started; earlier tasks are not here. A task is one attempt: one that failed may be tried "
        "again, as the next task of its rollout (-a2, -a3). The outcome of a run: "
        "rollout status RUN, rollout errors RUN."
    )


def make_flower(app: Any, settings: FlowerSettings, password: str, about: str) -> Any:
    """Return the dashboard of a Celery app: read-only, with a password and a note on each page."""
    import flower.options  # noqa: F401  (defines the options)
    from flower.app import Flower
    from flower.urls import settings as web_settings
    from tornado.options import options

    for name, value in {
        "address": settings.host,
        "port": settings.port,
        "basic_auth": [f"{settings.user}:{password}"],
        "read_only": True,
        # A saved state would show tasks as running that ended while Flower was not running.
        "persistent": False,
        "conf": "",
        "max_tasks": _MAX_TASKS,
        "tasks_columns": COLUMNS,
    }.items():
        setattr(options, name, value)
    templates = templates_with(about, web_settings["template_path"])
    return Flower(capp=app, options=options, template_loader=templates, **web_settings)


def end_silent_tasks(dashboard: Any, lease_s: float) -> None:
    """End the tasks of silent workers while the dashboard runs; see `SilentWorkers`."""
    from tornado.ioloop import PeriodicCallback

    silent = SilentWorkers(dashboard.events.state, lease_s)
    PeriodicCallback(silent.check, _CHECK_EVERY_S * 1000).start()


def templates_with(note: str, folder: str) -> BaseLoader:
    """Return Flower's own templates, with a note below the navigation bar of each page."""
    from tornado.escape import xhtml_escape
    from tornado.template import DictLoader

    pages = {page.name: page.read_text(encoding="utf-8") for page in Path(folder).glob("*.html")}
    pages["flower-navbar.html"] = pages["navbar.html"]
    pages["navbar.html"] = (
        '{% include "flower-navbar.html" %}'
        f'<p class="small text-secondary px-3 pt-2 mb-0" id="rollout-note">{xhtml_escape(note)}</p>'
    )
    return DictLoader(pages)


class SilentWorkers:
    """Marks the tasks of workers as failed that are silent for longer than their lease.

    A worker that stops sends an event. A killed worker sends none, so Flower would show its tasks
    as started for ever. If the worker was only disconnected, later events of its tasks take
    precedence.

    Args:
        state: Flower's `EventsState`; used in its event loop only.
        lease_s: Silence after which the reconciler, too, treats a worker's attempts as lost.
    """

    def __init__(self, state: Any, lease_s: float) -> None:
        self._state = state
        self._lease_s = lease_s
        #: Worker → monotonic time at which its silence was noticed; None: its tasks are ended.
        self._silent_since: dict[str, float | None] = {}

    def check(self) -> None:
        """End the tasks of workers that have been silent for too long."""
        now = time.monotonic()
        for name, worker in list(self._state.workers.items()):
            if worker.alive:
                self._silent_since.pop(name, None)
                continue
            since = self._silent_since.setdefault(name, now)
            if since is not None and now - since >= self._lease_s:
                self._end(name, worker)
                self._silent_since[name] = None

    def _end(self, name: str, worker: Any) -> None:
        heartbeat_at = worker.heartbeats[-1] if worker.heartbeats else None
        for label, task in list(self._state.tasks.items()):
            if task.state == "STARTED" and task.worker.hostname == name:
                self._state.event(self._lost(label, task, heartbeat_at))
        worker.active = 0
        metrics = self._state.metrics
        metrics.worker_number_of_currently_executing_tasks.labels(name).set(0)
        metrics.worker_online.labels(name).set(0)

    def _lost(self, label: str, task: Any, heartbeat_at: float | None) -> dict[str, Any]:
        # Flower treats an event's timestamp as a time when the worker was alive, so use an old one.
        at = heartbeat_at or task.timestamp
        return {
            "type": "task-failed",
            "uuid": label,
            "hostname": task.worker.hostname,
            "timestamp": at,
            "local_received": at,
            "clock": task.clock,
            "exception": _LOST.format(task.worker.hostname, self._lease_s),
        }
