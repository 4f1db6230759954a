"""The Celery tasks `rollout.run` and `rollout.rescore`, and the commands of the controller.

`LoopPool` runs a task on the event loop; the completion goes to the outbox. The task's return value
has the one line that operators see in Flower. Must not: decide anything about a rollout.
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
from pipeline.queue.signing import CANCEL, POLICY, REQUEST, Forged, Signer
from workers.process.celery_hooks import TaskEnd, WorkerRequest
from workers.process.execution import execute
from workers.process.heartbeats import RejectedMessages
from workers.process.loop import LoopThread
from workers.process.outbox import Outbox
from workers.process.runtime import Runtime
from workers.process.scoring import rescore

log = logging.getLogger(__name__)

#: Characters of an error's message in Flower, which keeps many tasks in memory.
_MAX_MESSAGE_CHARS = 300

#: The end of a second delivery; the first one reports the outcome.
_DUPLICATE = TaskEnd("duplicate delivery, not run again", event=None)


def register_tasks(
    app: Celery,
    *,
    runtime: Runtime,
    loop: LoopThread,
    outbox: Outbox,
    signer: Signer,
    rejected: RejectedMessages,
    sends_events: bool,
) -> None:
    """Register the application's tasks, bound to the objects of this process."""
    payloads = runtime.payloads  # opened now: opening it blocks

    @app.task(name=TASK_RUN, Request=WorkerRequest, send_events=sends_events)
    async def run(delivery: WorkerRequest, message: str, signature: str = "") -> TaskEnd:
        try:
            signer.check(message, signature, REQUEST)
            request = parse_message(RolloutRequest, message)
        except Forged as error:
            # A completion would end an attempt that another worker may be running, so none is sent.
            log.error("A request was rejected: %s", error)
            rejected.add(str(error), message)
            return TaskEnd(f"forged request: {error}", "task-failed")
        except MalformedMessage as error:
            log.error("A request could not be decoded: %s", error)
            completion = _malformed(message, error, runtime.worker_id)
            if completion is not None:
                outbox.put(completion)
            else:
                rejected.add(str(error), message)
            return TaskEnd(f"malformed request: {error}", "task-failed")
        if runtime.in_flight.knows(request.key):
            return _DUPLICATE
        if earlier := delivery.earlier_deliveries:
            lost_count = request.lost_count + earlier
            request = request.model_copy(update={"lost_count": lost_count})
        completion = await execute(request, runtime)
        outbox.put(completion)
        return end_of(completion)

    @app.task(name=TASK_RESCORE, Request=WorkerRequest, send_events=sends_events)
    async def run_rescore(_: WorkerRequest, message: str, signature: str = "") -> TaskEnd:
        try:
            signer.check(message, signature, REQUEST)
            request = parse_message(RescoreRequest, message)
        except MalformedMessage as error:
            log.error("A request to score again was rejected: %s", error)
            rejected.add(str(error), message)
            return TaskEnd(f"malformed request: {error}", "task-failed")
        completion = await rescore(request, payloads, runtime.worker_id, redactor=runtime.redactor)
        outbox.put(completion)
        return end_of(completion)

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


def end_of(completion: Completion) -> TaskEnd:
    """Return the end that operators see for the task; with an error the task has failed."""
    tokens = completion.prompt_tokens + completion.completion_tokens
    if (error := completion.error) is not None:
        is_handed_back = error.error_class is ErrorClass.WORKER_STOPPED
        return TaskEnd(
            f"{error.error_class} code={error.code} tokens={tokens}: "
            f"{error.message[:_MAX_MESSAGE_CHARS]}",
            "task-retried" if is_handed_back else "task-failed",
        )
    if completion.purpose == "handover":
        return TaskEnd("handed over to its remote session")
    if completion.purpose == "rescore":
        return TaskEnd(f"reward={completion.reward:g}")
    reward = "none" if completion.reward is None else f"{completion.reward:g}"
    return TaskEnd(
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
