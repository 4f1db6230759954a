"""A run as an evaluation log of Inspect, for its viewer and its data frames.

Called by `rollout export --to inspect`. Needs the extra `inspect`. Must not: lease or change
anything, or give a failed rollout a score.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from pipeline.contract.rollout import group_label_of
from pipeline.queue.payloads import PayloadStore
from pipeline.store.runs import Run
from pipeline.trainer.export import ExportReport, export_lines
from pipeline.trainer.export_files import unwritable
from pipeline.trainer.extras import require_extra

#: The score of a sample that is the rollout's reward; the reward's parts have their own names.
REWARD = "reward"


def write_inspect_log(
    engine: Engine, run: Run, path: Path, *, payloads: PayloadStore
) -> ExportReport:
    """Write the terminal rollouts of a run as a log; it is made in memory.

    A prompt is a sample and its rollouts are the epochs, from 1. A failed rollout is a sample with
    an error and without scores. The log's status is `started` while rollouts are not terminal.

    Args:
        engine: The trajectory store.
        run: Which run.
        path: Replaced as a whole at the end; `.eval` is compressed, `.json` is text.
        payloads: The payload store, for bodies that are not in the database.

    Raises:
        MissingExtra: inspect_ai is not installed.
        InputError: The file cannot be written.
    """
    require_extra("inspect_ai", "inspect", use="Logs of Inspect need")
    from inspect_ai.log import write_eval_log  # pyright: ignore[reportMissingImports]

    report = ExportReport()
    lines = list(export_lines(engine, run, payloads=payloads, report=report))
    log = _log(run, lines, is_complete=not report.unfinished)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            part = Path(folder) / path.name
            write_eval_log(log, str(part), format="json" if path.suffix == ".json" else "eval")
            part.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    return report


def _log(run: Run, lines: list[dict[str, Any]], *, is_complete: bool) -> Any:
    from inspect_ai.log import (  # pyright: ignore[reportMissingImports]
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalScore,
        EvalSpec,
    )

    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    mean = EvalMetric(name="mean", value=sum(rewards) / len(rewards)) if rewards else None
    score = EvalScore(
        name=REWARD,
        scorer=REWARD,
        scored_samples=len(rewards),
        unscored_samples=len(lines) - len(rewards),
        metrics={"mean": mean} if mean else {},
    )
    config = run.config
    return EvalLog(
        status="success" if is_complete else "started",
        eval=EvalSpec(
            eval_id=str(run.run_id),
            run_id=str(run.run_id),
            created=run.created_at.isoformat(),
            task=run.slug,
            task_id=str(run.run_id),
            solver=config.agent,
            dataset=EvalDataset(
                name=next((line["dataset"] for line in lines), None),
                samples=len({line["group"] for line in lines}),
            ),
            model=config.model or next((each["model"] for each in lines if each["model"]), ""),
            config=EvalConfig(epochs=config.n),
        ),
        results=EvalResults(
            total_samples=len(lines), completed_samples=len(rewards), scores=[score]
        ),
        samples=[_sample(run, line) for line in lines],
    )


def _sample(run: Run, line: dict[str, Any]) -> Any:
    from inspect_ai.log import EvalError, EvalSample  # pyright: ignore[reportMissingImports]
    from inspect_ai.model import ModelOutput, ModelUsage  # pyright: ignore[reportMissingImports]

    prompt, model = line["prompt"], line["model"] or ""
    error = line["error"]
    usage = ModelUsage(
        input_tokens=line["prompt_tokens"] or 0,
        output_tokens=line["completion_tokens"] or 0,
        total_tokens=(line["prompt_tokens"] or 0) + (line["completion_tokens"] or 0),
    )
    return EvalSample(
        id=group_label_of(run.slug, line["group"]),
        epoch=line["index"] + 1,
        input=_messages(prompt["messages"])
        if prompt.get("messages")
        else str(prompt.get("content", "")),
        target=_text(prompt.get("answer")),
        messages=_messages(line["messages"]),
        output=ModelOutput.from_content(model, line["final_answer"] or ""),
        scores=_scores(line) or None,
        model_usage={model: usage} if model else {},
        total_time=line["latency_s"],
        completed_at=line["finished_at"],
        error=EvalError(
            message=f"{error['class']}: {error['message']}", traceback="", traceback_ansi=""
        )
        if error
        else None,
        metadata={
            "rollout_id": line["rollout_id"],
            "stop_reason": line["stop_reason"],
            "attempts": line["attempts"],
            "version_min": line["version_min"],
            "version_max": line["version_max"],
        },
    )


def _scores(line: dict[str, Any]) -> dict[str, Any]:
    from inspect_ai.scorer import Score  # pyright: ignore[reportMissingImports]

    if line["reward"] is None:
        return {}
    parts = {
        part["name"]: Score(value=part["value"])
        for part in line["rewards"]
        if part["value"] is not None
    }
    return {**parts, REWARD: Score(value=line["reward"], answer=line["final_answer"])}


def _messages(messages: list[dict[str, Any]]) -> list[Any]:
    from inspect_ai.model import (  # pyright: ignore[reportMissingImports]
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
    )

    kinds: dict[str, Any] = {
        "system": ChatMessageSystem,
        "developer": ChatMessageSystem,
        "assistant": ChatMessageAssistant,
        "tool": ChatMessageTool,
    }
    found: list[Any] = []
    for message in messages:
        fields: dict[str, Any] = {"content": _text(message.get("content"))}
        if message["role"] == "tool":
            fields["tool_call_id"] = message.get("tool_call_id")
        if message["role"] == "assistant" and message.get("tool_calls"):
            fields["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        found.append(kinds.get(message["role"], ChatMessageUser)(**fields))
    return found


def _tool_call(call: dict[str, Any]) -> Any:
    from inspect_ai.tool import ToolCall  # pyright: ignore[reportMissingImports]

    function = call["function"]
    try:
        arguments, wrong = json.loads(function.get("arguments") or "{}"), None
    except ValueError as error:
        arguments, wrong = {}, str(error)
    if not isinstance(arguments, dict):
        arguments, wrong = {}, "the arguments are no object"
    return ToolCall(
        id=str(call.get("id", "")),
        function=str(function.get("name", "")),
        arguments=arguments,
        parse_error=wrong,
    )


def _text(content: Any) -> str:
    """Return content as text; what is no text is shown as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return json.dumps(content)
