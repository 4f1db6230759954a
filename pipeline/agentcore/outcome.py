"""The outcome of an attempt from the result that its session saved, or from the lack of one.

Used by the service in `results.py`. The app's verdict counts: its reward, or its error; where the
run names a reward, a worker gives it later. The calls that a gateway recorded become those of the
trajectory. A result without a valid reward is an error. Must not: read a clock,
S3 or the store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from pipeline.contract.errors import AgentTimeout, ContractError, ErrorClass, RolloutError
from pipeline.contract.messages import Completion, ErrorRecord, storable
from pipeline.contract.model_call import version_range
from pipeline.contract.rollout import StopReason
from pipeline.contract.trajectory import TrajectoryRecord, digest_of, pack_record
from pipeline.store.remote_sessions import RemoteAttempt
from pipeline.tokens.recorded_calls import NO_CALLS, RemoteCalls
from pipeline.tokens.token_body import pack_tokens

#: Keys of a result that the completion has in fields of its own.
_OWN_KEYS = frozenset({"rollout_data", "rewards", "status_code", "traceback"})
_STOP_REASONS = {"max_tokens": StopReason.MAX_TOKENS, "length": StopReason.MAX_TOKENS}

Redact = Callable[[bytes], bytes]


def outcome_of(
    attempt: RemoteAttempt,
    body: bytes,
    *,
    elapsed_s: float,
    redact: Redact = lambda data: data,
    recorded: RemoteCalls = NO_CALLS,
) -> Completion:
    """Return the completion for a result.

    Args:
        attempt: The attempt whose session saved the result.
        body: The object.
        elapsed_s: Time since the attempt began.
        redact: Removes secrets from what is stored.
        recorded: The calls that gateways recorded.
    """
    try:
        result = json.loads(redact(body))
        if not isinstance(result, dict):
            raise ValueError(f"it is a {type(result).__name__}")
    except (ValueError, RecursionError) as error:
        problem = ContractError(f"The result is no JSON object: {error}.", code="result_no_json")
        return _failed(attempt, problem, elapsed_s=elapsed_s, record=_calls_alone(recorded))
    turns = _turns_of(result)
    record = _record_of(result, turns, recorded)
    stop_reason = _STOP_REASONS.get(str(result.get("stop_reason")), StopReason.ANSWERED)
    try:
        _require_success(result)
        reward = _reward_of(result) if attempt.reward is None else _require_answer(record)
        record.metadata["stop_reason"] = str(stop_reason)
        stored = pack_record(record)
    except RolloutError as error:
        detail = str(result.get("traceback") or "")
        return _failed(
            attempt, error, elapsed_s=elapsed_s, record=record, turns=turns, detail=detail
        )
    return Completion(
        **_identity(attempt),
        purpose="attempt" if attempt.reward is None else "unscored",
        outcome="succeeded",
        stop_reason=stop_reason,
        reward=reward,
        timings={"elapsed_s": elapsed_s},
        **_body_fields(attempt, record, turns, stored),
    )


def timed_out(attempt: RemoteAttempt, recorded: RemoteCalls = NO_CALLS) -> Completion:
    """Return the completion of a session that gave no result in time."""
    waited_s = attempt.target.session_timeout_s
    error = AgentTimeout(
        f"The session gave no result within {waited_s:g} s (agentcore.session_timeout_s): neither "
        "a message nor an object in the bucket."
    )
    return _failed(attempt, error, elapsed_s=waited_s, record=_calls_alone(recorded))


def refused(
    attempt: RemoteAttempt,
    why: str,
    *,
    code: str,
    elapsed_s: float,
    recorded: RemoteCalls = NO_CALLS,
) -> Completion:
    """Return the completion of a result that is not read."""
    error = ContractError(why, code=code)
    return _failed(attempt, error, elapsed_s=elapsed_s, record=_calls_alone(recorded))


def _require_success(result: dict[str, Any]) -> None:
    if result.get("status_code", 200) == 200:
        return
    error = RolloutError(str(result.get("stop_reason") or "the app gave no reason"), code="app")
    if result.get("error_class") == str(ErrorClass.CONTRACT):
        error = ContractError(str(error), code="app")
    raise error


def _reward_of(result: dict[str, Any]) -> float:
    """Return the reward: the number, or the last one of the list."""
    if "rewards" not in result:
        raise ContractError("The result has no `rewards`.", code="no_reward")
    rewards = result["rewards"]
    values: list[Any] = rewards if isinstance(rewards, list) else [rewards]
    if not values:
        raise ContractError("The result's `rewards` are empty.", code="bad_reward")
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _is_finite(value):
            raise ContractError(
                f"The result's `rewards` hold {str(value)[:100]!r}, which is no finite number.",
                code="bad_reward",
            )
    return float(values[-1])


def _require_answer(record: TrajectoryRecord) -> None:
    """Check that the run's reward has something to score; the app's reward need not exist."""
    if not record.steps:
        raise ContractError(
            "The run's reward has nothing to score: the messages of the result's last turn hold no "
            "answer of the model.",
            code="no_answer",
        )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _turns_of(result: dict[str, Any]) -> list[Any]:
    turns = result.get("rollout_data")
    return turns if isinstance(turns, list) else []


def _messages_of(turn: Any) -> list[dict[str, Any]]:
    request = turn.get("formatted_request") if isinstance(turn, dict) else None
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list):
        return []
    return [message for message in messages if isinstance(message, dict)]


def _record_of(result: dict[str, Any], turns: list[Any], recorded: RemoteCalls) -> TrajectoryRecord:
    """Return the record: the last turn's messages, and of each turn how many of them are its own.

    Turns repeat the messages before them; stored as they are, they would grow with their square.
    """
    messages = _messages_of(turns[-1]) if turns else []
    compact = [_without_repetition(turn, messages) for turn in turns]
    rest = {name: value for name, value in result.items() if name not in _OWN_KEYS}
    metadata: dict[str, Any] = {"result": rest, "rewards": result.get("rewards")}
    if compact:
        metadata["turns"] = compact
    if recorded.unanswered:
        metadata["calls_unanswered"] = recorded.unanswered
    if recorded.missing:
        metadata["calls_missing"] = recorded.missing
    answer = next((m for m in reversed(messages) if m.get("role") == "assistant"), None)
    steps: list[dict[str, Any]] = []
    if answer is not None:
        steps = [{"step_type": "final_answer", "content": _text_of(answer), "metadata": {}}]
    return TrajectoryRecord(messages=messages, steps=steps, calls=recorded.calls, metadata=metadata)


def _calls_alone(recorded: RemoteCalls) -> TrajectoryRecord | None:
    return TrajectoryRecord(calls=recorded.calls) if recorded.calls else None


def _without_repetition(turn: Any, messages: list[dict[str, Any]]) -> Any:
    own = _messages_of(turn)
    if not own or own != messages[: len(own)]:
        return turn
    request = {key: value for key, value in turn["formatted_request"].items() if key != "messages"}
    return {**turn, "formatted_request": {**request, "n_messages": len(own)}}


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in parts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _failed(
    attempt: RemoteAttempt,
    error: RolloutError,
    *,
    elapsed_s: float,
    record: TrajectoryRecord | None = None,
    turns: list[Any] | None = None,
    detail: str = "",
) -> Completion:
    fields: dict[str, Any] = {}
    if record is not None:
        fields = _body_fields(attempt, record, turns or [], pack_record(record))
    return Completion(
        **_identity(attempt),
        outcome="failed",
        error=ErrorRecord(
            error_class=error.error_class,
            code=error.code,
            message=storable(str(error)),
            detail=storable(detail),
            phase="remote",
        ),
        timings={"elapsed_s": elapsed_s},
        **fields,
    )


def _identity(attempt: RemoteAttempt) -> dict[str, Any]:
    return {
        "run_id": attempt.run_id,
        "group_id": attempt.group_id,
        "rollout_id": attempt.rollout_id,
        "attempt_no": attempt.attempt_no,
        "label": attempt.label,
        "worker_id": attempt.worker_id or "",
    }


def _body_fields(
    attempt: RemoteAttempt, record: TrajectoryRecord, turns: list[Any], body: bytes
) -> dict[str, Any]:
    calls = record.calls
    version_min, version_max = version_range(calls, attempt.policy_version)
    tokens = pack_tokens(calls)
    return {
        "n_turns": len(calls) or len(turns),
        "n_steps": len(record.steps),
        "prompt_tokens": sum(call.prompt_tokens or 0 for call in calls),
        "completion_tokens": sum(call.completion_tokens or 0 for call in calls),
        "version_min": version_min,
        "version_max": version_max,
        "body": body,
        "body_bytes": len(body),
        "body_digest": digest_of(body),
        "tokens": tokens,
        "tokens_bytes": len(tokens),
        "tokens_digest": digest_of(tokens) if tokens else None,
    }
