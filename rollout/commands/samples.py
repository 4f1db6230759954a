"""`rollout samples`: print a few rollouts of a run: question, final answer, reward, error."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.store.rollout_filter import parse_filter
from pipeline.store.runs import Run
from pipeline.store.samples import read_samples
from pipeline.trainer.bodies import try_read_record
from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import number, print_json, safe_text
from rollout.tables import prompt_preview

#: The default condition: rollouts that have ended.
_ENDED = "status in ['succeeded', 'failed']"

_SHOWN_CHARS = 600
_NAME_WIDTH = 11


def samples(
    ctx: typer.Context,
    run: RunName = "@last",
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR",
            help='Only matching rollouts: "reward == 0 and turns > 2". Fields: status, reward, '
            "stop_reason, label, error_class, error_code, message, phase, worker, group, index, "
            "attempts, lost, turns, tokens.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rollouts to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Print a few rollouts: question, answer, reward, error.

    The order is that of the groups. `rollout show rollout LABEL --messages` prints the whole
    conversation of a rollout.
    """
    condition = parse_filter(where or _ENDED)
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        rows = deployment.transact(
            lambda connection: read_samples(connection, found, condition, limit=limit)
        )
        payloads = open_payloads(deployment.settings)
        documents = [_document(found, row, payloads) for row in rows]
    if as_json:
        print_json({"run": found.slug, "where": where, "samples": documents})
    elif not documents:
        print(f"Run {found.slug} has no such rollout.")
    else:
        for document in documents:
            _print(document)


def _document(run: Run, row: Any, payloads: PayloadStore) -> dict[str, Any]:
    record, unreadable = try_read_record(row, payloads)
    error = None
    if row.error_class is not None:
        error = {"class": row.error_class, "code": row.error_code, "message": row.error_message}
    return {
        "label": f"{run.slug}-g{row.group_no:06d}-r{row.rollout_index}",
        "rollout_id": str(row.rollout_id),
        "status": row.state,
        "reward": row.reward,
        "stop_reason": row.stop_reason,
        "turns": row.n_turns,
        "tokens": (row.prompt_tokens or 0) + (row.completion_tokens or 0),
        "prompt": row.payload,
        "final_answer": None if record is None else record.final_answer,
        "error": error,
        "unreadable": None if unreadable is None else str(unreadable),
    }


def _print(sample: dict[str, Any]) -> None:
    error, answer = sample["error"], sample["final_answer"]
    print(
        f"── {sample['label']}: {sample['status']}, reward {number(sample['reward'])}, "
        f"{sample['turns'] or 0} turns, {sample['tokens']} tokens"
    )
    for name, value in (
        ("question", prompt_preview(sample["prompt"], width=_SHOWN_CHARS)),
        ("expected", sample["prompt"].get("answer")),
        ("answer", "(no trajectory is stored)" if answer is None else answer),
        ("stopped", sample["stop_reason"]),
        ("error", error and f"{error['class']} ({error['code']}): {error['message']}"),
        ("unreadable", sample["unreadable"]),
    ):
        if value not in (None, ""):
            _print_field(name, str(value))


def _print_field(name: str, value: str) -> None:
    """Print a name and its text, with the text's further lines indented."""
    shown = value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 1] + "…"
    indented = textwrap.indent(safe_text(shown), " " * _NAME_WIDTH)
    print(name.ljust(_NAME_WIDTH) + indented.lstrip())
