"""All errors, as two trees and one table.

    PipelineError                 the pipeline is wrong or down; the process reports it
    ├── ConfigError               a setting or an option cannot work            exit 3
    ├── InputError                a dataset, a row or an argument is bad        exit 2
    ├── NotFound                  no run, group or rollout of that name         exit 2
    ├── StoreUnavailable          Postgres does not answer                      exit 6
    ├── StoreRejected             Postgres refuses what was to be stored        exit 1
    ├── QueueUnavailable          the broker does not answer                    exit 6
    ├── ServiceUnavailable        another service does not answer or start      exit 6
    ├── SchemaOutdated            the database is not migrated                  exit 3
    ├── NotAllowed                not allowed in the current state              exit 7
    ├── WaitTimeout               a wait ended without its condition            exit 5
    ├── UnreadableBody            a stored trajectory is gone or damaged        exit 6
    ├── AccountingBroken          rows of a run contradict each other           exit 1
    ├── MalformedMessage          a message that cannot be decoded
    ├── StaleCompletion           a completion for a rollout already decided
    └── IllegalTransition         a move that is not in the transition table
    RolloutError                  one rollout went wrong; the error becomes data
    ├── ModelError: ModelRateLimit, PolicyPaused, ModelTransportError, ModelBadRequest,
    │   ContextOverflow
    ├── AgentError, AgentTimeout  raised by agent code; its wall clock ran out
    ├── PolicyLimit               a budget ran out, and the run fails on that
    ├── ToolError                 a tool failed, and the run fails on that
    ├── SandboxError              the sandbox would not start or died
    ├── RewardError               the scorer raised or gave no finite number
    ├── ContractError             an agent or reward returned a wrong shape
    ├── WorkerStopped             a graceful stop handed the attempt back
    └── ProcessDied               the rollout's own process died, and its worker lives

Authors of agents, tools and rewards raise plain exceptions; `boundary` attributes them, and an
error that already has a type passes through. Must not: log, retry, or know any service.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType


class PipelineError(Exception):
    """The pipeline is wrong or down: the text names the problem, its cause and its remedy.

    Args:
        what: The problem, in one sentence.
        why: The cause, when it is known.
        remedy: The next step for the reader.
        code: Stable code that overrides the class's own, such as `E103`.
    """

    code = "E100"
    exit_code = 1

    def __init__(self, what: str, *, why: str = "", remedy: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy
        self.code = code or type(self).code

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.remedy) if part)


class ConfigError(PipelineError):
    """A setting or an option cannot work."""

    code = "E101"
    exit_code = 3


class SchemaOutdated(ConfigError):
    """The database's schema is not the one this version needs."""

    code = "E102"


class InputError(PipelineError):
    """A dataset, a row or an argument is bad."""

    code = "E110"
    exit_code = 2


class NotFound(PipelineError):
    """No run, group or rollout of that name."""

    code = "E120"
    exit_code = 2


class NotAllowed(PipelineError):
    """Not allowed in the current state. Nothing was changed."""

    code = "E130"
    exit_code = 7


class WaitTimeout(PipelineError):
    """A wait ended without its condition; the message names the condition."""

    code = "E140"
    exit_code = 5


class ServiceUnavailable(PipelineError):
    """A service does not answer or would not start."""

    code = "E200"
    exit_code = 6


class QueueUnavailable(ServiceUnavailable):
    """The broker does not answer."""

    code = "E201"


class StoreUnavailable(ServiceUnavailable):
    """Postgres does not answer."""

    code = "E202"


class StoreRejected(PipelineError):
    """Postgres refuses what was to be stored: the same data would be refused again."""

    code = "E305"


class AccountingBroken(PipelineError):
    """Rows of a run contradict each other."""

    code = "E307"


class UnreadableBody(PipelineError):
    """A stored trajectory that is gone, damaged, or of another execution than its reward."""

    code = "E206"
    exit_code = 6


class MalformedMessage(PipelineError):
    """A message that cannot be decoded, or has a newer schema."""

    code = "E301"


class StaleCompletion(PipelineError):
    """A completion for a rollout whose outcome is already decided."""

    code = "E302"


class IllegalTransition(PipelineError):
    """A move that is not in the transition table."""

    code = "E303"


class ErrorClass(StrEnum):
    """The boundary that a rollout's error crossed; the key of the error table."""

    MODEL_RATE_LIMIT = "model_rate_limit"
    MODEL_TRANSPORT = "model_transport"
    MODEL_BAD_REQUEST = "model_bad_request"
    CONTEXT_OVERFLOW = "context_overflow"
    POLICY_LIMIT = "policy_limit"
    AGENT_TIMEOUT = "agent_timeout"
    TOOL_ERROR = "tool_error"
    SANDBOX = "sandbox"
    REWARD_ERROR = "reward_error"
    WORKER_LOST = "worker_lost"
    WORKER_STOPPED = "worker_stopped"
    AGENT_BUG = "agent_bug"
    CONTRACT = "contract"
    POISON = "poison"


class RolloutError(Exception):
    """One rollout went wrong; the error becomes part of its record.

    Args:
        message: The problem, in words.
        code: Stable finer code within the class, such as `http_400`.
        retry_after_s: Wait that the server asked for, if any.
    """

    error_class = ErrorClass.AGENT_BUG
    code = "error"

    def __init__(self, message: str, *, code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s


class ModelError(RolloutError):
    """A model call failed."""

    error_class = ErrorClass.MODEL_TRANSPORT


class ModelRateLimit(ModelError):
    """The endpoint still answered 429 after the wait budget was used up."""

    error_class = ErrorClass.MODEL_RATE_LIMIT
    code = "http_429"


class PolicyPaused(ModelRateLimit):
    """The trainer paused the policy for longer than a model call waits."""

    code = "policy_paused"


class ModelTransportError(ModelError):
    """5xx, timeout, connection reset: the call may work next time."""

    code = "transport"


class ModelBadRequest(ModelError):
    """4xx or an answer that is no completion: the same call would fail again."""

    error_class = ErrorClass.MODEL_BAD_REQUEST
    code = "http_400"


class ContextOverflow(ModelError):
    """The prompt no longer fits the model's context window."""

    error_class = ErrorClass.CONTEXT_OVERFLOW
    code = "context_overflow"


class AgentError(RolloutError):
    """The agent's own code raised."""

    code = "agent_raised"


class AgentTimeout(RolloutError):
    """The wall clock of the agent phase ran out."""

    error_class = ErrorClass.AGENT_TIMEOUT
    code = "agent_timeout"


class PolicyLimit(RolloutError):
    """A budget ran out or the output could not be parsed, and the run fails on that."""

    error_class = ErrorClass.POLICY_LIMIT
    code = "policy_limit"


class ToolError(RolloutError):
    """A tool call failed, and the run fails on that instead of telling the model."""

    error_class = ErrorClass.TOOL_ERROR
    code = "tool_failed"


class SandboxError(RolloutError):
    """The sandbox would not start, died, or ran out of memory."""

    error_class = ErrorClass.SANDBOX
    code = "sandbox"


class RewardError(RolloutError):
    """The scorer raised, timed out, or gave no finite number."""

    error_class = ErrorClass.REWARD_ERROR
    code = "reward_raised"


class ContractError(RolloutError):
    """An agent or a reward returned a wrong shape, or a name is not registered here."""

    error_class = ErrorClass.CONTRACT
    code = "contract"


class WorkerStopped(RolloutError):
    """A graceful stop handed the attempt back before it was done."""

    error_class = ErrorClass.WORKER_STOPPED
    code = "worker_stopped"


class ProcessDied(RolloutError):
    """The process of an isolated rollout died, and its worker lives: the rollout is the cause."""

    error_class = ErrorClass.WORKER_LOST
    code = "process_died"


@contextmanager
def boundary(error_type: type[RolloutError], code: str = "") -> Generator[None, None, None]:
    """Turn exceptions of foreign code into the error of the boundary that they cross.

    A `RolloutError` passes through unchanged. So do cancellation and interpreter exits, which are
    no `Exception`.
    """
    try:
        yield
    except RolloutError:
        raise
    # Broad on purpose: foreign code (agents, tools, rewards) may raise anything, and all of it is
    # this rollout's error, never the worker's. docs/architecture.md lists all such places.
    except Exception as error:
        raise error_type(f"{type(error).__name__}: {_text_of(error)}", code=code) from error


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    # The error's `__str__` is foreign code too.
    except Exception as failure:
        return f"(its text cannot be shown: {type(failure).__name__})"


class Action(StrEnum):
    """The effect of an error on its rollout."""

    RETRY = "retry"  #: new attempt; uses one of the attempts
    RETRY_FREE = "retry_free"  #: new attempt; uses none (waits, hand-backs)
    RETRY_LOST = "retry_lost"  #: new attempt; uses the budget `max_lost`
    FAIL = "fail"  #: final; kept as an error rollout with reward NULL
    SCORE = "score"  #: not an error: the trajectory so far is scored
    OBSERVE = "observe"  #: not an error: the model reads its text as the tool's result


#: The error table (docs/errors.md); a run can override each row (`on_error`).
ERROR_TABLE: Mapping[ErrorClass, Action] = MappingProxyType(
    {
        ErrorClass.MODEL_RATE_LIMIT: Action.RETRY_FREE,
        ErrorClass.MODEL_TRANSPORT: Action.RETRY,
        ErrorClass.MODEL_BAD_REQUEST: Action.FAIL,
        ErrorClass.CONTEXT_OVERFLOW: Action.SCORE,
        ErrorClass.POLICY_LIMIT: Action.SCORE,
        ErrorClass.AGENT_TIMEOUT: Action.SCORE,
        ErrorClass.TOOL_ERROR: Action.OBSERVE,
        ErrorClass.SANDBOX: Action.RETRY,
        ErrorClass.REWARD_ERROR: Action.FAIL,
        ErrorClass.WORKER_LOST: Action.RETRY_LOST,
        ErrorClass.WORKER_STOPPED: Action.RETRY_FREE,
        ErrorClass.AGENT_BUG: Action.RETRY,
        ErrorClass.CONTRACT: Action.FAIL,
        ErrorClass.POISON: Action.FAIL,
    }
)

#: Ends that leave a trajectory worth scoring; a run may fail them instead (`on_error`).
SCORED_BY_DEFAULT = (
    ErrorClass.CONTEXT_OVERFLOW,
    ErrorClass.POLICY_LIMIT,
    ErrorClass.AGENT_TIMEOUT,
)
