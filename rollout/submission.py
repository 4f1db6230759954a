"""Enqueues a dataset as a run's prompts, groups and rollouts; bad rows go to a separate file.

`run` and `submit` use it. The origin of the run (dataset, plug-ins, commit) is stored with it. Must
not: fail because the origin cannot be determined.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.contract.errors import NotAllowed
from pipeline.contract.rollout import RunState
from pipeline.contract.run import RunConfig, RunOrigin
from pipeline.store.prompts import PromptSource
from producers.datasets import BadRow, read_prompts
from producers.enqueue import EnqueueReport, enqueue
from rollout.deployment import Deployment
from rollout.output import fields, note
from rollout.run_options import SubmitOptions

#: File names that only state the split; the dataset is then named after the folder.
_SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval", "data"})

#: Longest wait for git: a folder on a slow network must not hold up a run.
_GIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Submission:
    """An enqueued dataset."""

    report: EnqueueReport
    skipped: int | None  #: bad rows; None without `--skip-bad`

    def __str__(self) -> str:
        report = self.report
        return (
            f"Run {report.run.slug}: {report.prompts} prompts, {report.rollouts} rollouts; "
            f"{report.added} prompts are new."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of `rollout submit --json`."""
        document = fields(self.report, "prompts", "rollouts", "added")
        skipped = {} if self.skipped is None else {"skipped": self.skipped}
        return {"run": self.report.run.slug} | document | skipped


def require_source(options: SubmitOptions) -> None:
    """Check that the dataset exists, before any process is started.

    Raises:
        InputError: The dataset does not exist, or has no known format.
    """
    read_prompts(options.dataset)


def enqueue_dataset(
    deployment: Deployment,
    options: SubmitOptions,
    config: RunConfig,
    *,
    slug: str | None = None,
    plugins: Sequence[str] | None = None,
) -> Submission:
    """Enqueue a dataset as a run.

    Args:
        deployment: The store.
        options: The dataset and the options for reading it.
        config: The run's configuration.
        slug: The run's name; None: the name in the options.
        plugins: Plug-ins of the run's own workers; None: those of the settings.

    Raises:
        InputError: The dataset or the name is invalid.
        NotAllowed: The run is cancelled, or exists with another configuration.
    """
    name, split = name_and_split(options)
    slug = slug or options.run or new_slug(name)
    bad_rows = _BadRows(deployment.settings.data_dir / "bad-rows" / f"{slug}.jsonl")
    prompts = read_prompts(
        options.dataset,
        prompt_field=options.prompt_field,
        answer_field=options.answer_field,
        split=split,
        limit=options.limit,
        on_bad=bad_rows.keep if options.skip_bad else None,
    )
    stored = deployment.find_exactly(slug)
    if stored is not None and stored.state is RunState.CANCELLED:
        raise NotAllowed(
            f"Run {slug} is cancelled.",
            remedy=f"Choose another name with --run, or take it up again: rollout retry {slug} "
            "--cancelled",
        )
    report = enqueue(
        deployment.engine,
        run=slug,
        config=config,
        source=PromptSource(name, split=split, epoch=options.epoch),
        prompts=prompts,
        origin=_origin(
            options.dataset, deployment.settings.worker.plugins if plugins is None else plugins
        ),
    )
    if bad_rows.count:
        note(f"{bad_rows.count} bad rows were skipped; they are in {bad_rows.path}")
    return Submission(report, bad_rows.count if options.skip_bad else None)


def name_and_split(options: SubmitOptions) -> tuple[str, str]:
    """Return the names that identify the rows: the dataset's name and its split.

    They do not depend on the file's folder, so that a moved file adds no rows.
    """
    source = options.dataset
    if source.startswith("hf:"):
        return options.dataset_name or source.removeprefix("hf:"), options.split or "train"
    path = Path(source).expanduser().absolute()
    stem = path.name.split(".")[0] or path.name
    if stem.lower() in _SPLIT_NAMES:
        return options.dataset_name or path.parent.name or stem, options.split or stem
    return options.dataset_name or stem, options.split or "train"


def new_slug(name: str) -> str:
    """Return a run's name made of the dataset's name and a few random digits."""
    last = name.rstrip("/").rpartition("/")[2].partition(":")[0].lower()
    stem = "".join(char if char.isascii() and char.isalnum() else "-" for char in last)
    return f"{stem.strip('-')[:40].strip('-') or 'run'}-{secrets.token_hex(2)}"


class _BadRows:
    """Writes rejected rows to a separate file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def keep(self, bad: BadRow) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Each call overwrites the file, so that the same row is not listed twice.
        with self.path.open("a" if self.count else "w", encoding="utf-8") as file:
            line = {
                "location": bad.location,
                "code": bad.code,
                "reason": bad.reason,
                "row": bad.raw,
            }
            file.write(json.dumps(line) + "\n")
        self.count += 1


def _origin(dataset: str, plugins: Sequence[str]) -> RunOrigin:
    """Return the origin of a run that this command begins."""
    is_name = dataset.startswith("hf:")
    return RunOrigin(
        dataset=dataset if is_name else str(Path(dataset).expanduser().absolute()),
        plugins=tuple(plugins),
        version=_version(),
        commit=_commit(),
    )


def _version() -> str | None:
    try:
        return version("rollout-pipeline")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the git commit of the current folder; None without one, or if git is slow."""
    command = ("git", "rev-parse", "--verify", "--quiet", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False, text=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
