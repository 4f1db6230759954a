"""Output that several commands share: a run's status, scores, errors and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.store.status import RunStatus, Score
from rollout.output import counts, note, number, print_json, print_table, safe_text

_EXAMPLE_CHARS = 240

#: Exit code of a command whose run failed.
EXIT_RUN_FAILED = 4


def exit_code(final: RunStatus, *, go_on: str) -> int:
    """Return the exit code of a command that waited for a run; print the reason if it is not 0.

    Args:
        final: The run's status at the end of the wait.
        go_on: The command that resumes a paused run.
    """
    run, failed = final.run, final.rollouts["failed"]
    if failed:
        note(f"{failed} of {final.rollouts['total']} rollouts failed. See: rollout errors {run}")
    if not final.has_failed:
        return 0
    allowed = f"more than the {final.allowed_error_rate:.0%} that are allowed"
    why = allowed if final.is_done else f"it is paused because {final.state_reason}"
    note(
        f"Run {run} has failed: {why}. When the cause is repaired, queue the failed rollouts again "
        f"(rollout retry {run}) and go on (rollout {go_on} {run})."
    )
    return EXIT_RUN_FAILED


def print_status(status: RunStatus, *, as_json: bool = False) -> None:
    """Print a run's status as text, or as the document of `rollout status --json`."""
    if as_json:
        print_json(status.to_json())
        return
    succeeded = status.rollouts["succeeded"]
    rows: list[tuple[str, Any]] = [
        ("state", status.state),
        ("groups", counts(status.groups)),
        ("rollouts", _rollouts(status)),
        ("reward", reward_text(status)),
        ("attempts", status.attempts),
        ("retries", status.retries),
        ("errors", counts(status.errors)),
        *(("model calls", line) for line in describe_calls(status)),
        *([("tools", describe_tools(status))] if status.activity.tools else []),
        ("tokens", f"{status.prompt_tokens:,} prompt, {status.completion_tokens:,} completion"),
        ("token ids", f"recorded for {status.with_tokens:,} of {succeeded:,} succeeded rollouts"),
        ("elapsed", f"{status.elapsed_s:.1f} s"),
    ]
    if status.drops:
        rows.insert(2, ("dropped", counts(status.drops)))
    if status.sums.cut:
        share = f"{status.sums.cut_share:.0%} of {status.sums.rollouts} rollouts"
        rows.insert(2, ("cut", f"{status.sums.cut}, {share}: not needed or not in time"))
    rows.insert(2, ("sum", f"{status.sums}{'' if status.sums.adds_up else ' (DOES NOT ADD UP)'}"))
    print_table(("run", status.run), rows)
    if len(status.scores) > 1:
        print_scores(status.scores)
    for sentence in filter(None, (status.trainer, *status.waits, *status.warnings)):
        print(sentence)


def print_scores(scores: Sequence[Score]) -> None:
    """Print the means of the rewards and their parts."""
    print_table(
        ("scored by", "version", "trajectories", "mean"),
        [(each.name, each.version, each.n, number(each.mean)) for each in scores],
        right=("trajectories", "mean"),
    )


def _rollouts(status: RunStatus) -> str:
    total = status.rollouts["total"]
    by_state = {name: n for name, n in status.rollouts.items() if name != "total"}
    return f"{total}: {counts(by_state)}"


def reward_text(status: RunStatus) -> str:
    """Return a run's mean reward, its standard error, and the numbers of rollouts and prompts."""
    if status.reward_mean is None:
        return "none yet"
    over = f"{status.reward_n} rollouts of {status.reward_prompts} prompts"
    if status.reward_stderr is None:
        return f"{number(status.reward_mean)} (mean of {over})"
    mean = f"{number(status.reward_mean)} ± {number(status.reward_stderr)}"
    return f"{mean} (mean ± standard error, {over})"


def describe_calls(status: RunStatus) -> list[str]:
    """Return one line per called endpoint: the number of calls, and the failures by kind."""
    lines: list[str] = []
    for calls in status.activity.endpoints:
        failures = {failed.code: failed.count for failed in calls.failures}
        failed = f", {sum(failures.values()):,} failed: {counts(failures)}" if failures else ""
        lines.append(f"{calls.count:,} to {calls.base_url} ({calls.model}){failed}")
    return lines


def describe_tools(status: RunStatus) -> str:
    """Return the numbers of calls and failures of each tool."""
    return ", ".join(
        f"{name} {calls.count:,}" + (f" ({calls.errors:,} failed)" if calls.errors else "")
        for name, calls in sorted(status.activity.tools.items())
    )


def prompt_preview(prompt: dict[str, Any], width: int = 60) -> str:
    """Return the beginning of a prompt on one line."""
    content = prompt.get("content")
    if content is None:
        messages = prompt.get("messages") or [{}]
        content = messages[-1].get("content", "")
    line = " ".join(str(content).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def print_errors(rows: list[dict[str, Any]], *, by: str) -> None:
    """Print the result of one of the `errors_by_*` functions."""
    {"class": _print_by_class, "tool": _print_by_tool, "worker": _print_by_worker}[by](rows)


def _print_by_class(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("error class", "code", "attempts", "failed rollouts"),
        [(row["error_class"], row["code"], row["attempts"], row["rollouts"]) for row in rows],
        right=("attempts", "failed rollouts"),
    )
    for row in rows:
        if example := row["example"]:
            message = " ".join(str(example["message"]).split())[:_EXAMPLE_CHARS]
            print(safe_text(f"{row['code'] or row['error_class']}: {example['label']}: {message}"))


def _print_by_tool(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("tool", "calls", "errors"),
        [(row["tool"], row["calls"], row["errors"]) for row in rows],
        right=("calls", "errors"),
    )


def _print_by_worker(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("worker", "attempts", "errors", "by class"),
        [(row["worker"], row["attempts"], row["errors"], counts(row["by_class"])) for row in rows],
        right=("attempts", "errors"),
    )


def print_tracebacks(tracebacks: list[dict[str, Any]]) -> None:
    """Print the result of `list_tracebacks`."""
    if not tracebacks:
        print("No attempt left a traceback.")
    for each in tracebacks:
        kind = each["code"] or each["error_class"]
        print(f"── {each['attempts']} × {kind}, the last one {each['label']}")
        print(safe_text(each["traceback"].rstrip()))
