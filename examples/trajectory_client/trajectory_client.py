"""A reader of the trajectory store: list, find, summarise and export rollouts.

The client only reads; it leases no groups and changes nothing. Lines are those of
`rollout export`, plain dicts with `label`, `state`, `reward`, `stop_reason`, `error`, `messages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sqlalchemy import Engine

from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings, load_settings
from pipeline.store.engine import transact
from pipeline.store.inspection import find_rollout, read_rollout
from pipeline.store.runs import Run, get_run, list_runs
from pipeline.store.status import run_status
from pipeline.trainer.bodies import read_record
from pipeline.trainer.export import export_lines
from pipeline.trainer.export_files import Format, open_writer, output_file, require_format
from rollout.deployment import open_deployment
from workers.core.trajectory import Trajectory
from workers.process.records import trajectory_of

Line = dict[str, Any]
Condition = Callable[[Line], bool]


@dataclass(frozen=True)
class StoredTrajectory:
    """A rollout of the store, and the trajectory of its last attempt."""

    rollout: dict[str, Any]
    trajectory: Trajectory | None


class TrajectoryClient:
    """Reads one store.

    Args:
        engine: The store.
        payloads: Where trajectories lie that are too large for it.
    """

    def __init__(self, engine: Engine, payloads: PayloadStore) -> None:
        self._engine = engine
        self._payloads = payloads

    @classmethod
    @contextmanager
    def connect(cls, settings: Settings | None = None) -> Iterator[TrajectoryClient]:
        """Open the store that the settings name, or that of `.rollout` in this folder.

        Raises:
            NotFound: There is no store here.
        """
        settings = settings or load_settings()
        data_dir = settings.data_dir.expanduser().resolve()
        settings = settings.model_copy(update={"data_dir": data_dir})
        with open_deployment(settings) as deployment:
            yield cls(deployment.engine, open_payloads(deployment.settings))

    def runs(self) -> list[Line]:
        """Return the latest runs with their figures."""
        found = transact(self._engine, list_runs)
        return [self._status(run) for run in found]

    def list(self, run: str, *, limit: int = 20) -> list[Line]:
        """Return the first finished rollouts of a run, by group and index."""
        with closing(self._lines(run)) as lines:
            return list(islice(lines, limit))

    def get(self, name: str) -> StoredTrajectory:
        """Return the rollout of a label, such as `math7-g000013-r3`, or of an id's beginning.

        Raises:
            NotFound: There is none, or there are several.
        """
        rollout = transact(self._engine, lambda c: read_rollout(c, find_rollout(c, name)))
        winner = rollout["winner_attempt_no"]
        for attempt in reversed(rollout["attempts"]):
            if winner not in (None, attempt["attempt_no"]) or attempt["trajectory"] is None:
                continue
            record = read_record(attempt["trajectory"], self._payloads)
            assert record is not None
            trajectory = trajectory_of(record, rollout["label"])
            trajectory.is_completed = rollout["state"] == "succeeded"
            trajectory.final_reward = rollout["reward"]
            return StoredTrajectory(rollout, trajectory)
        return StoredTrajectory(rollout, None)

    def filter(self, run: str, condition: Condition) -> Iterator[Line]:
        """Yield the finished rollouts for which a condition holds, in flat memory."""
        return filter(condition, self._lines(run))

    def statistics(self, run: str) -> Line:
        """Return a run's figures: states, rewards, stop reasons, turns, tools and errors."""
        found = self._run(run)
        stops: Counter[str] = Counter()
        tools: Counter[str] = Counter()
        turns: list[int] = []
        for line in self._lines(run):
            if line["state"] == "succeeded":
                stops[line["stop_reason"]] += 1
                turns.append(line["n_turns"])
            for name, count in line["tools"].items():
                tools[name] += count["calls"]
        return {
            **self._status(found),
            "stop_reasons": dict(stops.most_common()),
            "turns": {"mean": fmean(turns), "median": median(turns)} if turns else {},
            "tool_calls": dict(tools.most_common()),
        }

    def export(
        self, run: str, path: Path, *, to: Format = "jsonl", condition: Condition | None = None
    ) -> int:
        """Write the finished rollouts for which a condition holds; return how many.

        Raises:
            InputError: The file cannot be written.
            ConfigError: The package for the format is not installed.
        """
        require_format(to)
        written = 0
        with output_file(path) as file:
            writer = open_writer(file, to, run=run)
            for line in self.filter(run, condition or (lambda _: True)):
                writer.write(line)
                written += 1
            writer.close()
        return written

    def _run(self, slug: str) -> Run:
        return transact(self._engine, lambda connection: get_run(connection, slug))

    def _status(self, run: Run) -> Line:
        return transact(self._engine, lambda connection: run_status(connection, run)).to_json()

    def _lines(self, run: str) -> Generator[Line, None, None]:
        return export_lines(self._engine, self._run(run), payloads=self._payloads)
