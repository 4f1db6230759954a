"""Errors that the gateway answers, and the one that each error of a model call becomes.

The server raises and catches `Rejection`; each dialect writes it in the form that its SDK reads.
Must not: know a dialect.
"""

from __future__ import annotations

import math

from pipeline.contract.errors import (
    AgentError,
    ContextOverflow,
    ModelBadRequest,
    ModelRateLimit,
    PipelineError,
    PolicyPaused,
    RolloutError,
)

#: Code of the rate limit error of a call that waited too long for the shared limits.
LIMIT_WAIT = "limit_wait"
#: Codes of errors that concern the request itself: the server's status is passed on.
_OF_THE_REQUEST = frozenset({"http_400", "http_404", "http_413", "http_422"})


class Rejection(Exception):
    """An answer that is an error.

    Args:
        status: The HTTP status.
        message: The cause and the remedy.
        code: OpenAI's `code`, which programs compare.
        may_repeat: Whether the SDK may send the request again. The model client has already tried
            again, and SDKs repeat 409, 429 and 5xx unless a header forbids that.
        retry_after_s: Time after which the request may be repeated.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        may_repeat: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.may_repeat = may_repeat
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers that tell an SDK whether and when to repeat the request."""
        headers = {"x-should-retry": "true" if self.may_repeat else "false"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
        return headers


def bad_request(message: str) -> Rejection:
    """Return the rejection of a request that can never be answered."""
    return Rejection(400, message, code="invalid_request")


def attempt_over(label: str) -> Rejection:
    """Return the rejection of a call after the end of its attempt."""
    return Rejection(
        409,
        f"The attempt {label} has ended or was given up: no further model call is made.",
        code="attempt_over",
    )


def interleaved_calls() -> Rejection:
    """Return the rejection of a stream that this dialect cannot write."""
    return Rejection(
        502,
        "The model's server streams several tool calls at once, and this API cannot express that. "
        "Request an answer that is not streamed, or use chat completions.",
        code="interleaved_calls",
    )


def rejection_of(error: Exception) -> Rejection:
    """Return the answer to a call that failed."""
    text = str(error)
    match error:
        case Rejection():
            return error
        case ContextOverflow():
            return Rejection(400, text, code="context_length_exceeded")
        case ModelRateLimit():
            is_local = error.code in (LIMIT_WAIT, PolicyPaused.code)
            return Rejection(
                429,
                text,
                code="rate_limit_exceeded",
                may_repeat=is_local,
                retry_after_s=error.retry_after_s,
            )
        case ModelBadRequest() if error.code in _OF_THE_REQUEST:
            return Rejection(int(error.code.removeprefix("http_")), text, code="invalid_request")
        case AgentError():
            return Rejection(409, text, code="attempt_over")
        case RolloutError():
            return Rejection(502, text, code=error.code)
        case PipelineError() | ValueError():
            return bad_request(text)
    return Rejection(500, f"{type(error).__name__}: {text}", code="gateway_error")
