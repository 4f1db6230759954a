"""`rollout submit`: a dataset becomes a run's prompts, groups and rollouts.

Also what `run` needs of it: the options, the configuration they ask for, and enqueueing itself.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.contract.errors import NotAllowed
from pipeline.contract.rollout import RunState
from rollout.deployment import Deployment, opened, settings_of
from rollout.local_queue import require_allowed_endpoint
from rollout.options import Json, takes
from rollout.origin import origin_of
from rollout.output import note, print_json
from rollout.run_config import run_config

if TYPE_CHECKING:
    from producers.datasets import BadRow
    from producers.enqueue import EnqueueReport

#: File names that say nothing but which split it is; the folder then names the dataset.
_SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval", "data"})


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """A dataset and what is asked of it; None leaves it to the defaults of a run."""

    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET", help=".jsonl or .parquet file, saved dataset, or hf:NAME[:CONFIG]."
        ),
    ]
    run: Annotated[
        str | None, typer.Option(metavar="SLUG", help="The run's name (default: made up).")
    ] = None
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Default: single_turn.")] = None
    tools: Annotated[
        str | None, typer.Option(metavar="A,B", help="The agent's tools, separated by commas.")
    ] = None
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Default: exact_match; `none` (default of coding, swe): the agent's own verdict.",
        ),
    ] = None
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="Rollouts of each prompt (default: 1).")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None
    prompt_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Column of the prompt (default: prompt, question, …)."),
    ] = None
    answer_field: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="Column of the gold answer (default: answer, solution, …)."
        ),
    ] = None
    model: Annotated[str | None, typer.Option(help="Model name sent with each call.")] = None
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="OpenAI-compatible endpoint, with its /v1; more than once: replicas.",
        ),
    ] = None
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="Executions that count, per rollout (default: 3).")
    ] = None
    max_error_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of failed rollouts above which the run pauses and fails (default: 0.5 at "
            "its end, or all of its first ones; 1: never).",
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Turns and tool results of a trajectory (default: the agent's)."),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one model response (default: 512).")
    ] = None
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Wall clock of one attempt's agent (default: 600)."),
    ] = None
    temperature: Annotated[float | None, typer.Option(min=0, help="Of sampling.")] = None
    seed: Annotated[
        int | None, typer.Option(help="Of sampling; each rollout of a group adds its index.")
    ] = None
    purpose: Annotated[str | None, typer.Option(help="train or eval (default: train).")] = None
    queue: Annotated[
        str | None, typer.Option(help="Queue of the workers that may run it (default: rollouts).")
    ] = None
    split: Annotated[str | None, typer.Option(help="Split of the dataset.")] = None
    epoch: Annotated[
        int, typer.Option(min=0, help="Another one enqueues the same rows once more.")
    ] = 0
    dataset_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Names the rows (default: the file's name).")
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Put rows that cannot be read aside and go on.")
    ] = False
    on_error: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=ACTION", help="Change a row of the error table: retry, fail, …"
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Any field of a run, e.g. limits.max_steps=20."),
    ] = None


@takes(SubmitOptions, "options")
def submit(ctx: typer.Context, options: SubmitOptions, as_json: Json = False) -> None:
    """Enqueue a dataset for workers that run elsewhere.

    The same command again adds only what is missing.
    """
    from rollout.known_names import find_unknown

    config = run_config(options, settings_of(ctx).run)
    require_source(options)
    with opened(ctx, create=True) as deployment:
        for unknown in find_unknown(config, plugins=deployment.settings.worker.plugins):
            note(f"Warning: {unknown} Workers must have it among their plug-ins.")
        require_allowed_endpoint(deployment, config)
        document = submission_json(*enqueue_dataset(deployment, options, config))
    if as_json:
        print_json(document)
    else:
        print(
            f"Run {document['run']}: {document['prompts']} prompts, {document['rollouts']} "
            f"rollouts; {document['added']} prompts are new."
        )
        note(f"Follow it: rollout watch {document['run']}")


def require_source(options: SubmitOptions) -> None:
    """Check that the dataset is there, before anything is started for it.

    Raises:
        InputError: It is not, or has no known format.
    """
    from producers.datasets import read_prompts

    read_prompts(options.dataset)


def enqueue_dataset(
    deployment: Deployment,
    options: SubmitOptions,
    config: Any,
    *,
    slug: str | None = None,
    plugins: Sequence[str] | None = None,
    on_chunk: Callable[[int], None] = lambda _: None,
) -> tuple[EnqueueReport, int | None]:
    """Enqueue; return the report, and how many rows were put aside (None: none may be).

    Args:
        deployment: Where to.
        options: The dataset and how it is read.
        config: What is asked of it.
        slug: The run's name; None: as the options say.
        plugins: Those of the run's own workers; None: as the settings say.
        on_chunk: Told the number of prompts read so far.

    Raises:
        InputError: The dataset or the name is bad.
        NotAllowed: The run is cancelled, or exists and asks for something else.
    """
    from pipeline.store.prompts import PromptSource
    from producers.datasets import read_prompts
    from producers.enqueue import enqueue

    name, split = name_and_split(options)
    slug = slug or options.run or new_slug(name)
    aside = _BadRows(deployment.settings.data_dir / "bad-rows" / f"{slug}.jsonl")
    prompts = read_prompts(
        options.dataset,
        prompt_field=options.prompt_field,
        answer_field=options.answer_field,
        split=split,
        limit=options.limit,
        on_bad=aside.keep if options.skip_bad else None,
    )
    _refuse_cancelled(deployment, slug)
    report = enqueue(
        deployment.engine,
        run=slug,
        config=config,
        source=PromptSource(name, split=split, epoch=options.epoch),
        prompts=prompts,
        origin=origin_of(
            options.dataset,
            plugins=deployment.settings.worker.plugins if plugins is None else plugins,
        ),
        on_chunk=on_chunk,
    )
    if aside.count:
        note(f"{aside.count} bad rows were put aside: {aside.path}")
    return report, aside.count if options.skip_bad else None


def submission_json(report: EnqueueReport, skipped: int | None) -> dict[str, Any]:
    """Return the document of `rollout submit --json`."""
    document: dict[str, Any] = {
        "run": report.run.slug,
        "prompts": report.prompts,
        "rollouts": report.rollouts,
        "added": report.added,
    }
    return document if skipped is None else document | {"skipped": skipped}


def name_and_split(options: SubmitOptions) -> tuple[str, str]:
    """Return what the rows are called: the dataset's name and its split.

    Independent of where the file lies, so that the same file moved adds nothing.
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
    """Return a run's name made of the dataset's and a few random digits."""
    last = name.rstrip("/").rpartition("/")[2].partition(":")[0].lower()
    word = "".join(char if char.isascii() and char.isalnum() else "-" for char in last)
    return f"{word.strip('-')[:40].strip('-') or 'run'}-{secrets.token_hex(2)}"


class _BadRows:
    """Keeps rows that were refused in a file of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def keep(self, bad: BadRow) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A file per enqueueing: the same row met again must not be listed twice.
        with self.path.open("a" if self.count else "w", encoding="utf-8") as file:
            line = {
                "location": bad.location,
                "code": bad.code,
                "reason": bad.reason,
                "row": bad.raw,
            }
            file.write(json.dumps(line) + "\n")
        self.count += 1


def _refuse_cancelled(deployment: Deployment, slug: str) -> None:
    from sqlalchemy import select

    from pipeline.store.tables import runs

    state = deployment.transact(
        lambda connection: connection.execute(
            select(runs.c.state).where(runs.c.slug == slug)
        ).scalar_one_or_none()
    )
    if state == RunState.CANCELLED:
        raise NotAllowed(
            f"Run {slug} is cancelled.",
            remedy=f"Choose another name with --run, or take it up again: rollout retry {slug} "
            "--cancelled",
        )
