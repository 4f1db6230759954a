"""The Celery tasks `rollout.run` and `rollout.rescore`, and the commands of the controller.

A task thread submits the attempt to the event loop and waits for its end; the completion goes to
the outbox. The task's return value is the one line that operators see in Flower. Must not: decide
anything about a rollout.
"""

from __future__ import annotations

import logging
from typing import Any

import orjson
from celery import Celery
from celery.worker.control import Panel

from pipeline.contract.errors import ErrorClass, MalformedMessage
from pipeline.contract.messages import (
    TASK_RESCORE,
    TASK_RUN,
    AttemptBeat,
    AttemptRef,
    Completion,
    ErrorRecord,
    RescoreRequest,
    RolloutRequest,
    parse_message,
)
from pipeline.contract.policy import POLICIES
from pipeline.queue.payloads import PayloadStore
from pipeline.queue.signing import CANCEL, POLICY, REQUEST, Forged, Signer
from workers.process.celery_hooks import (
    WorkerRequest,
    earlier_deliveries,
    end_as,
    is_left_to_another,
)
from workers.process.execution import execute
from workers.process.heartbeats import RejectedMessages
from workers.process.loop import LoopThread
from workers.process.outbox import Outbox
from workers.process.runtime import Runtime
from workers.process.scoring import rescore

log = logging.getLogger(__name__)

#: Characters of an error's message in Flower, which keeps many tasks in memory.
_MAX_MESSAGE_CHARS = 300

#: Texts of a delivery that runs nothing; another delivery of the same task reports the outcome.
_LEFT = "left to another worker, which gets it again"
_DUPLICATE = "duplicate delivery, not run again"


def register_tasks(
    app: Celery,
    *,
    runtime: Runtime,
    loop: LoopThread,
    outbox: Outbox,
    payloads: PayloadStore,
    signer: Signer,
    rejected: RejectedMessages,
) -> None:
    """Register the application's tasks, bound to the objects of this process."""

    async def run_attempt(request: RolloutRequest) -> Completion | None:
        if runtime.in_flight.knows(request.key):
            return None
        completion = await execute(request, runtime)
        outbox.put(completion)
        return completion

    @app.task(name=TASK_RUN, ignore_result=True, Request=WorkerRequest)
    def run(message: str, signature: str = "") -> str:
        if is_left_to_another():
            return end_as(None, _LEFT)
        try:
            signer.check(message, signature, REQUEST)
            request = parse_message(RolloutRequest, message)
        except Forged as error:
            # Send no completion: it would end an attempt that another worker may be running.
            log.error("A request was rejected: %s", error)
            rejected.add(str(error), message)
            return end_as("task-failed", f"forged request: {error}")
        except MalformedMessage as error:
            log.error("A request could not be decoded: %s", error)
            completion = _malformed(message, error, runtime.worker_id)
            if completion is not None:
                outbox.put(completion)
            else:
                rejected.add(str(error), message)
            return end_as("task-failed", f"malformed request: {error}")
        if earlier := earlier_deliveries():
            lost_count = request.lost_count + earlier
            request = request.model_copy(update={"lost_count": lost_count})
        future = loop.submit(run_attempt(request))
        try:
            completion = future.result()
        except BaseException:
            # Cancelled by its label (fenced), or the thread pool is shutting down.
            if future.cancelled():
                return end_as("task-revoked", "stopped: no longer wanted")
            raise
        return end_as(None, _DUPLICATE) if completion is None else describe(completion)

    async def score_again(request: RescoreRequest) -> Completion:
        completion = await rescore(request, payloads, runtime.worker_id, redactor=runtime.redactor)
        outbox.put(completion)
        return completion

    @app.task(name=TASK_RESCORE, ignore_result=True, Request=WorkerRequest)
    def run_rescore(message: str, signature: str = "") -> str:
        if is_left_to_another():
            return end_as(None, _LEFT)
        try:
            signer.check(message, signature, REQUEST)
            request = parse_message(RescoreRequest, message)
        except MalformedMessage as error:
            log.error("A request to score again was rejected: %s", error)
            rejected.add(str(error), message)
            return end_as("task-failed", f"malformed request: {error}")
        return describe(loop.submit(score_again(request)).result())

    def cancel_attempts(_: Any, labels: list[str], signature: str = "") -> dict[str, Any]:
        try:
            signer.check("\n".join(labels), signature, CANCEL)
        except Forged as error:
            log.error("A command to stop attempts was rejected: %s", error)
            return {"error": str(error)}
        wanted = frozenset(labels)
        return {"stopped": loop.call(lambda: runtime.in_flight.stop(wanted), timeout_s=5)}

    def learn_policies(_: Any, message: str, signature: str = "") -> dict[str, Any]:
        try:
            signer.check(message, signature, POLICY)
            policies = POLICIES.validate_json(message)
        except (Forged, ValueError) as error:
            log.error("A command about policies was rejected: %s", error)
            return {"error": str(error)}
        loop.call(lambda: runtime.policies.learn(policies), timeout_s=5)
        return {"learned": len(policies)}

    Panel.data["cancel_attempts"] = cancel_attempts
    Panel.data["learn_policies"] = learn_policies


def describe(completion: Completion) -> str:
    """Return the line that operators see for the task; an error ends the task as failed."""
    tokens = completion.prompt_tokens + completion.completion_tokens
    if (error := completion.error) is not None:
        is_handed_back = error.error_class is ErrorClass.WORKER_STOPPED
        return end_as(
            "task-retried" if is_handed_back else "task-failed",
            f"{error.error_class} code={error.code} tokens={tokens}: "
            f"{error.message[:_MAX_MESSAGE_CHARS]}",
        )
    if completion.purpose == "handover":
        return "handed over to its remote session"
    if completion.purpose == "rescore":
        return f"reward={completion.reward:g}"
    reward = "none" if completion.reward is None else f"{completion.reward:g}"
    return (
        f"reward={reward} turns={completion.n_turns} tokens={tokens} stop={completion.stop_reason}"
    )


def reserved_beats(requests: Any) -> tuple[AttemptBeat, ...]:
    """Return the attempts that Celery has reserved and not started, for the heartbeat."""
    beats: list[AttemptBeat] = []
    for reserved in list(requests):
        if getattr(reserved, "name", TASK_RUN) != TASK_RUN:
            continue
        try:
            data = orjson.loads(orjson.loads(reserved.body)[0][0])
            beats.append(
                AttemptBeat(
                    rollout_id=data["rollout_id"], attempt_no=data["attempt_no"], phase="reserved"
                )
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            continue
    return tuple(beats)


def _malformed(message: str, error: MalformedMessage, worker_id: str) -> Completion | None:
    """Return the completion of a malformed request; None if the request names no attempt."""
    try:
        data = orjson.loads(message)
        return Completion(
            **{name: data[name] for name in AttemptRef.model_fields},
            worker_id=worker_id,
            outcome="failed",
            error=ErrorRecord(
                error_class=ErrorClass.CONTRACT, code="malformed_request", message=str(error)
            ),
        )
    except (ValueError, KeyError, TypeError):
        return None
