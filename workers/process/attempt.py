"""The state of one attempt while it runs, and the completion made from it.

Owned by `execute`. The heartbeat reads phase and step from another thread, which is safe because
both are single values. Must not: run agents or scorers.
"""

from __future__ import annotations

import math
import time
import traceback
from dataclasses import replace
from typing import Any, Literal

from pipeline.contract.errors import ContractError, RolloutError, boundary
from pipeline.contract.journal import RESUMED_AFTER
from pipeline.contract.messages import Completion, ErrorRecord, RewardPart, RolloutRequest, storable
from pipeline.contract.model_call import version_range
from pipeline.contract.rollout import StopReason
from pipeline.contract.trajectory import TrajectoryRecord, digest_of, pack_record
from pipeline.redaction import NOTHING, Redactor
from pipeline.tokens.token_body import pack_tokens
from workers.core.trajectory import Trajectory
from workers.process.agent_timeout import WallClock
from workers.process.journal import Journal
from workers.process.model_calls import ModelCalls
from workers.process.records import record_of, stop_reason_of

Phase = Literal["starting", "generating", "scoring", "done"]


class Attempt:
    """The state of one attempt."""

    def __init__(
        self, request: RolloutRequest, worker_id: str, *, redactor: Redactor = NOTHING
    ) -> None:
        self.request = request
        self.worker_id = worker_id
        self._redactor = redactor
        self.trajectory = Trajectory(request_id=request.label)
        self.calls: ModelCalls | None = None
        #: The completion of the remote session whose trajectory this attempt scores.
        self.unscored: Completion | None = None
        self.journal: Journal | None = None
        self.clock: WallClock | None = None
        self.phase: Phase = "starting"
        #: The step that an isolated process reported; `calls` is None in its worker.
        self.reported_step = 0
        self.stop_reason = StopReason.ANSWERED
        self.reward: float | None = None
        self.reward_parts: tuple[RewardPart, ...] = ()
        self._started = time.perf_counter()
        self._phase_started = self._started
        self._timings: dict[str, float] = {}

    @property
    def step(self) -> int:
        """The number of the model call under way, or of the last one."""
        return self.reported_step if self.calls is None else self.calls.current_call

    def take_over(self, unscored: Completion, trajectory: Trajectory) -> None:
        """Take the trajectory of a remote session, to score it."""
        self.unscored, self.trajectory = unscored, trajectory
        self.stop_reason = stop_reason_of(trajectory)

    def enter(self, phase: Phase) -> None:
        """Enter the next phase and record the duration of the last one."""
        now = time.perf_counter()
        self._timings[f"{self.phase}_s"] = round(now - self._phase_started, 6)
        self.phase, self._phase_started = phase, now

    def detach(self) -> None:
        """Copy the trajectory so far: an agent that does not stop writes to the former one."""
        self.trajectory = replace(
            self.trajectory,
            steps=list(self.trajectory.steps),
            metadata=dict(self.trajectory.metadata),
        )
        if self.calls is not None:
            self.calls.close()

    def succeeded(self) -> Completion:
        """Return the completion of a good trajectory.

        Raises:
            ContractError: The agent left a value in the trajectory that cannot be stored.
        """
        fields = {
            "outcome": "succeeded",
            "stop_reason": self.stop_reason,
            "reward": self.reward,
        }
        if self.unscored is not None:
            self.enter("done")
            return self._scored(self.unscored, fields)
        record, body = self._packed()
        self.enter("done")
        return self._completion(record, body, **fields)

    def failed(self, error: RolloutError) -> Completion:
        """Return the completion of an error, with the trajectory so far."""
        phase = self.phase
        self.enter("done")
        if self.journal is not None and error.error_class in RESUMED_AFTER:
            self.journal.flush()
        cause = error.__cause__ or error
        detail = "".join(traceback.format_exception(cause))
        record = ErrorRecord(
            error_class=error.error_class,
            code=self._clean(str(error.code)),
            message=self._clean(str(error)),
            detail=self._clean(detail),
            phase=phase,
            retry_after_s=_finite(error.retry_after_s),
        )
        if self.unscored is not None:
            return self._scored(self.unscored, {"outcome": "failed", "error": record})
        return self._completion(*self._packed_or_less(), outcome="failed", error=record)

    def _clean(self, text: str) -> str:
        # Redact before the text is cut: the redactor would not find half a secret.
        return storable(self._redactor.text(text))

    def _packed(self) -> tuple[TrajectoryRecord, bytes]:
        with boundary(ContractError, "unrecordable"):
            record = record_of(self.trajectory, self.calls)
            return record, pack_record(record, redact=self._redactor.data)

    def _packed_or_less(self) -> tuple[TrajectoryRecord, bytes]:
        try:
            return self._packed()
        except ContractError as error:
            record = TrajectoryRecord(metadata={"unrecordable": self._clean(str(error))})
            return record, pack_record(record)

    def _scored(self, unscored: Completion, fields: dict[str, Any]) -> Completion:
        """Return the completion with the trajectory as the session left it."""
        self._timings["elapsed_s"] = round(time.perf_counter() - self._started, 6)
        own: dict[str, Any] = {
            **self.request.identity,
            "worker_id": self.worker_id,
            "purpose": "attempt",
            "reward_parts": self.reward_parts,
            "timings": self._timings,
            "calls_replayed": unscored.n_turns,
            "replayed_from": (unscored.attempt_no,),
            "tokens_saved": unscored.prompt_tokens + unscored.completion_tokens,
        }
        return unscored.model_copy(update=own | fields)

    def _completion(self, record: TrajectoryRecord, body: bytes, **fields: Any) -> Completion:
        request, calls, journal = self.request, self.calls, self.journal
        version_min, version_max = version_range(
            calls.calls if calls else (), request.policy_version
        )
        tokens = pack_tokens(calls.calls) if calls else b""
        self._timings["elapsed_s"] = round(time.perf_counter() - self._started, 6)
        return Completion(
            **request.identity,
            worker_id=self.worker_id,
            reward_parts=self.reward_parts,
            n_turns=len(calls.calls) if calls else 0,
            n_steps=len(record.steps),
            prompt_tokens=calls.prompt_tokens if calls else 0,
            completion_tokens=calls.completion_tokens if calls else 0,
            version_min=version_min,
            version_max=version_max,
            timings=self._timings,
            body=body,
            body_bytes=len(body),
            body_digest=digest_of(body),
            calls_replayed=journal.calls_replayed if journal else 0,
            replayed_from=tuple(sorted(journal.replayed_from)) if journal else (),
            tokens_saved=journal.tokens_saved if journal else 0,
            tokens=tokens,
            tokens_bytes=len(tokens),
            tokens_digest=digest_of(tokens) if tokens else None,
            **fields,
        )


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None
