"""The output of `rollout show`: runs, groups, rollouts and conversations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.contract.trajectory import TrajectoryRecord
from pipeline.store.runs import Run
from pipeline.store.status import RunStatus
from rollout.output import number, print_fields, print_json, print_table, safe_text
from rollout.segment_tables import segments_document
from rollout.tables import print_status, prompt_preview

if TYPE_CHECKING:
    from pipeline.tokens.segments import Segments


def print_run(
    found: Run, status: RunStatus, groups: list[dict[str, Any]], *, as_json: bool
) -> None:
    """Print a run: its status, configuration, origin and first groups."""
    config = found.config.model_dump(mode="json")
    origin = found.origin.model_dump(mode="json")
    if as_json:
        print_json(
            status.to_json()
            | {
                "drops": status.drops,
                "waits": list(status.waits),
                "reason": found.state_reason,
                "policy_version": found.policy_version,
                "created_at": found.created_at.isoformat(),
                "config": config,
                "first_groups": groups,
                "origin": origin,
            }
        )
        return
    print_status(status)
    print_fields("asked for", config)
    print_fields("came from", origin)
    _print_groups(groups, total=sum(status.groups.values()))


def print_group(found: dict[str, Any], *, as_json: bool) -> None:
    """Print a group: its prompt and its rollouts."""
    if as_json:
        print_json(found)
        return
    print_table(
        ("group", found["label"]),
        [
            ("id", found["group_id"]),
            ("state", _group_state(found)),
            ("mean reward", number(found["reward_mean"])),
            ("standard deviation", number(found["reward_std"])),
            ("prompt", prompt_preview(found["prompt"], width=400)),
            ("answer", found["prompt"].get("answer")),
        ],
    )
    print_table(
        ("rollout", "state", "reward", "attempts", "stop reason", "error"),
        [
            (
                each["label"],
                each["state"],
                number(each["reward"]),
                each["attempts"],
                each["stop_reason"],
                each["error_class"],
            )
            for each in found["rollouts"]
        ],
        right=("reward", "attempts"),
    )


def _print_groups(groups: list[dict[str, Any]], *, total: int) -> None:
    if not groups:
        return
    print_table(
        ("group", "state", "succeeded", "failed", "reward mean", "prompt"),
        [
            (
                each["label"],
                _group_state(each),
                f"{each['succeeded']}/{each['rollouts']}",
                each["failed"],
                number(each["reward_mean"]),
                prompt_preview(each["prompt"]),
            )
            for each in groups
        ],
        right=("succeeded", "failed", "reward mean"),
    )
    if total > len(groups):
        print(f"{total - len(groups)} more groups: --limit {total}")


def _group_state(group: dict[str, Any]) -> str:
    reason = group["drop_reason"]
    return f"{group['state']} ({reason})" if reason else group["state"]


def rollout_document(
    found: dict[str, Any],
    record: TrajectoryRecord | None,
    merged: Segments | None,
    *,
    raw: bool,
) -> dict[str, Any]:
    """Return the document of `rollout show rollout --json`; `raw` adds the whole record."""
    document = found | {"messages": record.messages if record else []}
    if raw:
        document["record"] = record.model_dump() if record else None
    return document | (segments_document(merged) if merged else {})


def print_rollout(found: dict[str, Any]) -> None:
    """Print a rollout, its attempts and its scores."""
    print_table(
        ("rollout", found["label"]),
        [
            ("id", found["rollout_id"]),
            ("state", found["state"]),
            ("reward", number(found["reward"])),
            ("stop reason", found["stop_reason"]),
            ("error", found["error_class"]),
            ("prompt", prompt_preview(found["prompt"], width=400)),
            ("answer", found["prompt"].get("answer")),
        ],
    )
    print_table(
        ("attempt", "state", "worker", "turns", "tokens", "error"),
        [
            (
                each["attempt_no"],
                each["state"],
                each["worker"],
                each["n_turns"],
                sum(n or 0 for n in each["tokens"].values()),
                _error_line(each["error"]),
            )
            for each in found["attempts"]
        ],
        right=("turns", "tokens"),
    )
    for each in found["attempts"]:
        if each["calls_replayed"]:
            print(f"Attempt {each['attempt_no']}: {_replayed(each)}")
    if found["rewards"]:
        print_table(
            ("scored by", "version", "attempt", "value", "error"),
            [
                (
                    each["name"],
                    each["scorer_version"],
                    each["attempt_no"],
                    number(each["value"]),
                    each["error_class"],
                )
                for each in found["rewards"]
            ],
            right=("attempt", "value"),
        )


def _replayed(attempt: dict[str, Any]) -> str:
    numbers = [str(number) for number in attempt["replayed_from"]]
    calls = "1 call" if attempt["calls_replayed"] == 1 else f"{attempt['calls_replayed']} calls"
    noun = "attempt" if len(numbers) == 1 else "attempts"
    return f"{calls} replayed from {noun} {' and '.join(numbers)}"


def _error_line(error: dict[str, Any] | None) -> str:
    return "" if error is None else f"{error['class']} ({error['code']}): {error['message']}"


def print_messages(record: TrajectoryRecord | None) -> None:
    """Print the conversation of an attempt."""
    if record is None:
        print("No trajectory is stored.")
        return
    for message in record.messages:
        print(f"── {safe_text(str(message.get('role')))}")
        content = message.get("content")
        print(safe_text(content if isinstance(content, str) else json.dumps(content)))
        for call in message.get("tool_calls") or ():
            print(safe_text(f"   calls {json.dumps(call.get('function', call))}"))
