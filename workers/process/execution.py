"""One attempt, step by step: run the agent, score, return the completion.

Called by the Celery task on the event loop. A bad rollout is an outcome, not an exception: only
cancellation leaves `execute` without a completion. The agent of a run on AgentCore runs elsewhere:
one attempt starts its session, and a later attempt scores the session's trajectory. Must not: retry
an attempt, or know Celery.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from pipeline.contract.errors import (
    AgentError,
    AgentTimeout,
    ContextOverflow,
    ContractError,
    ErrorClass,
    PolicyLimit,
    RolloutError,
    SandboxError,
    ToolError,
    WorkerStopped,
    boundary,
)
from pipeline.contract.messages import Completion, RolloutRequest
from pipeline.contract.rollout import ISOLATED_FROM, StopReason
from workers.agents.coding_task import TaskError
from workers.agents.function_agent import AnswerShapeError
from workers.core.tool_call import recording_results
from workers.core.trajectory import Trajectory
from workers.process.agent_timeout import WallClock, run_within
from workers.process.attempt import Attempt
from workers.process.exit_guard import guard_exits
from workers.process.records import stop_reason_of
from workers.process.runtime import Runtime
from workers.process.scoring import Scorer
from workers.process.stored_trajectory import take_over
from workers.sandbox.base import SandboxFailure

#: Stop reasons that the policy causes; a run may count them as failures.
_POLICY_LIMITS = frozenset(
    {
        StopReason.MAX_STEPS,
        StopReason.MAX_TOKENS,
        StopReason.MAX_TOOL_CALLS,
        StopReason.PARSE_ERROR,
    }
)


async def execute(request: RolloutRequest, runtime: Runtime) -> Completion:
    """Run one attempt; its errors become part of the completion.

    Raises:
        asyncio.CancelledError: The attempt was cancelled because it is no longer wanted.
    """
    attempt = Attempt(request, runtime.worker_id, redactor=runtime.redactor)
    with runtime.in_flight.entered(attempt), runtime.activity.counted(attempt):
        try:
            # Errors outside the boundaries below also become an outcome of the rollout.
            with boundary(AgentError, "unexpected"):
                if request.agentcore is not None and request.unscored_no is None:
                    return await runtime.remote_sessions.start(attempt)
                if request.lost_count >= ISOLATED_FROM and runtime.isolation is not None:
                    completion = await runtime.isolation.run(attempt)
                    if completion is not None:
                        return completion
                if request.unscored_no is None:
                    await run_agent(attempt, runtime)
                else:
                    await take_over(attempt, runtime.payloads)
                await score_trajectory(attempt)
                return attempt.succeeded()
        except RolloutError as error:
            return attempt.failed(error)
        except asyncio.CancelledError:
            if not runtime.in_flight.is_handed_back(attempt):
                raise
            return attempt.failed(WorkerStopped("The worker was stopped before it was done."))


async def run_agent(attempt: Attempt, runtime: Runtime) -> None:
    """Run the agent until it answers, or until a budget or the wall clock ends."""
    request = attempt.request
    with boundary(ContractError, "agent_setup"):
        agent = await runtime.agents.agent_for(request)
    attempt.journal = await runtime.open_journal(request)
    attempt.calls = runtime.model_calls(attempt)
    attempt.enter("generating")
    try:
        attempt.clock = WallClock(request.limits.timeout_s)
        result = await run_within(_run(agent, attempt), attempt.clock, label=request.label)
        attempt.calls.close()
    except TimeoutError:
        attempt.detach()
        error = AgentTimeout(f"The agent was not done after {request.limits.timeout_s:g} s.")
        _require_judge(agent, attempt, error)
        _require_scored(attempt, error, StopReason.AGENT_TIMEOUT)
        return
    except ContextOverflow as error:
        _require_judge(agent, attempt, error)
        _require_scored(attempt, error, StopReason.CONTEXT_OVERFLOW)
        return
    _accept(attempt, result)


async def score_trajectory(attempt: Attempt) -> None:
    """Score the trajectory; a scorer that fails is tried again without the agent.

    Raises:
        RewardError: The scorer failed every time.
        ContractError: The scorer's result is no reward.
    """
    request = attempt.request
    if request.reward is None:
        # Some agents (coding, swe) set the reward themselves, by the task's tests.
        attempt.reward = _own_reward(attempt.trajectory.final_reward)
        return
    attempt.enter("scoring")
    scorer = Scorer(request.reward, request.reward_config, request.limits.reward_timeout_s)
    try:
        attempt.reward, attempt.reward_parts = await scorer.score(
            attempt.trajectory, request.prompt
        )
    except RolloutError as error:
        attempt.reward_parts = (scorer.failed(error.error_class),)
        raise


async def _run(agent: Any, attempt: Attempt) -> Any:
    with (
        boundary(AgentError),
        guard_exits(AgentError, "agent"),
        recording_results(attempt.journal),
    ):
        try:
            return await agent.run_trajectory(
                prompt=attempt.request.prompt,
                llm_generate_func=attempt.calls,
                request_id=attempt.request.label,
                trajectory=attempt.trajectory,
            )
        except SandboxFailure as error:
            raise SandboxError(str(error)) from error
        except AnswerShapeError as error:
            raise ContractError(str(error), code="agent_result") from error
        except TaskError as error:
            raise ContractError(str(error), code="coding_task") from error
        except Exception as error:
            failure = attempt.calls.failure if attempt.calls else None
            if failure is None or isinstance(error, RolloutError):
                raise
            # The agent's own client turned the model's error into an error of its SDK.
            raise failure from error


def _accept(attempt: Attempt, result: Any) -> None:
    if not isinstance(result, Trajectory):
        raise ContractError(
            f"Agent {attempt.request.agent} returned {type(result).__name__}, not a Trajectory.",
            code="agent_result",
        )
    attempt.trajectory = result
    if attempt.request.strict_tools:
        _require_tools_worked(result)
    attempt.stop_reason = stop_reason_of(result)
    if attempt.stop_reason in _POLICY_LIMITS:
        _require_scored(
            attempt,
            PolicyLimit(f"The trajectory ended by {attempt.stop_reason}."),
            attempt.stop_reason,
        )


def _require_tools_worked(trajectory: Trajectory) -> None:
    for name, count in trajectory.metadata.get("tools", {}).items():
        if count["errors"]:
            raise ToolError(f"{count['errors']} of {count['calls']} calls of {name} failed.")


def _require_judge(agent: Any, attempt: Attempt, error: RolloutError) -> None:
    """Raise the error if the agent sets the reward itself and was cut off before that."""
    if attempt.request.reward is None and getattr(agent, "judges_itself", False):
        raise error


def _require_scored(attempt: Attempt, error: RolloutError, stop_reason: StopReason) -> None:
    """Record the stop reason; raise the error instead if the run fails on it."""
    scored: tuple[ErrorClass, ...] = attempt.request.scored
    if error.error_class not in scored:
        raise error
    attempt.stop_reason = stop_reason
    attempt.trajectory.metadata["stop_reason"] = str(stop_reason)


def _own_reward(value: float | None) -> float | None:
    """Return the agent's own reward as it is stored.

    Raises:
        ContractError: The reward is no finite number.
    """
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ContractError(f"The agent's own reward is {value!r}.", code="agent_reward")
    return float(value)
