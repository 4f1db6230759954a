"""A sample of a run: question, answer, reward and error of a rollout, as a document or as text.

`rollout samples` uses it.
"""

from __future__ import annotations

import textwrap
from typing import Any

from pipeline.contract.rollout import rollout_label_of
from pipeline.queue.payloads import PayloadStore
from pipeline.store.runs import Run
from pipeline.store.samples import Sample
from pipeline.trainer.bodies import try_read_record
from rollout.output import number, safe_text
from rollout.tables import prompt_preview

_SHOWN_CHARS = 600
_NAME_WIDTH = 11


def sample_document(run: Run, row: Sample, payloads: PayloadStore) -> dict[str, Any]:
    """Return a rollout as `rollout samples --json` prints it."""
    record, unreadable = try_read_record(row, payloads)
    error = None
    if row.error_class is not None:
        error = {"class": row.error_class, "code": row.error_code, "message": row.error_message}
    return {
        "label": rollout_label_of(run.slug, row.group_no, row.rollout_index),
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


def print_sample(sample: dict[str, Any]) -> None:
    """Print a rollout; empty fields are left out."""
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
