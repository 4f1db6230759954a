"""The model errors that HTTP answers stand for, the same for every model endpoint.

The clients call `error_for_answer` for anything that is not a 200 and `error_in_body` for a 200
that carries an error. Must not: retry, or look at tokens and text of a good answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from pipeline.contract.errors import (
    ContextOverflow,
    ModelBadRequest,
    ModelError,
    ModelRateLimit,
    ModelTransportError,
)
from workers.llm.json_text import JsonError, parse_json

#: Longest piece of a server's own text that goes into an error message.
EXCERPT_CHARS = 400
#: The 4xx statuses that a retry can help: request timeout, too early.
RETRYABLE_4XX = frozenset({408, 425})
MALFORMED = "malformed_response"
#: Upper limit applied to `Retry-After`: the wait delays all calls to the endpoint.
MOST_RETRY_AFTER_S = 3600.0

# The wordings of OpenAI, vLLM, SGLang, llama.cpp, TGI, Anthropic, Mistral and their gateways.
# "max_tokens is too large" alone is a bad request: a shorter prompt would not help.
_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|context[ _](?:length|"
    r"window|limit|size)|max_model_len|maximum model length|prompt is too long|input is too long|"
    r"prompt too long|request_too_large|`inputs` tokens \+ `max_new_tokens`",
    re.IGNORECASE,
)
_OVERLOAD = re.compile(
    r"overload|unavailable|try again|time[d ]?[ -]?out|server_error|internal error|"
    r"internal server|capacity|no available|bad gateway",
    re.IGNORECASE,
)
_RATE_LIMIT = re.compile(r"rate.?limit|too many requests", re.IGNORECASE)


class HttpAnswer(NamedTuple):
    """One complete HTTP answer; `headers` ignores the case of names.

    `streamed` is the completion that the events of a streamed answer make.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    streamed: Mapping[str, Any] | None = None


def retry_after_s(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Read `retry-after-ms` or `Retry-After` (seconds or an HTTP date); None without a usable one.

    At most an hour. Source: RFC 9110, section 10.2.3.
    """
    wait_s = _requested_wait_s(headers, now)
    return None if wait_s is None else min(wait_s, MOST_RETRY_AFTER_S)


def _requested_wait_s(headers: Mapping[str, str], now: datetime | None) -> float | None:
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None or not value:
        return seconds
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())


def error_for_answer(answer: HttpAnswer, url: str) -> ModelError:
    """Return the error for an answer with a status other than 200."""
    body = _json_or_none(answer.body)
    detail = _message_in(body) if body is not None else _excerpt(answer.body)
    return _error_for_status(
        answer.status, detail, body=body, url=url, retry_after=retry_after_s(answer.headers)
    )


def error_in_body(body: Mapping[str, Any], url: str) -> ModelError | None:
    """Return the error that a 200 answer carries in its body, or None."""
    error = body.get("error")
    if not error:
        return None
    detail = _message_in(body)
    status = _embedded_status(error)
    if status is not None:
        return _error_for_status(status, detail, body=body, url=url, retry_after=None)
    text = f"{detail} {_codes_in(body)}"
    if _OVERFLOW.search(text):
        return ContextOverflow(f"{url} refused the prompt as too long: {detail}")
    if _RATE_LIMIT.search(text):
        return ModelRateLimit(f"{url} answered 200 with a rate limit in its body: {detail}")
    if _OVERLOAD.search(text):
        return ModelTransportError(
            f"{url} answered 200 with an overload in its body: {detail}", code="error_body"
        )
    return malformed(f"{url} answered 200 with an error in its body: {detail}")


def malformed(message: str) -> ModelBadRequest:
    """Return the error for an answer that is not a completion."""
    return ModelBadRequest(message, code=MALFORMED)


def check_answer_head(headers: Mapping[str, str], *, url: str, limit_bytes: int) -> None:
    """Reject an answer by its headers, before its body is read.

    Raises:
        ModelBadRequest: The body is longer than the limit, or compressed although no request asks
            for compression: a small compressed body can unpack to any size.
    """
    length = headers.get("content-length") or ""
    if length.isdigit() and int(length) > limit_bytes:
        raise answer_too_long(url, limit_bytes)
    encoding = (headers.get("content-encoding") or "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise malformed(
            f"{url} answered with content-encoding {encoding}, which was not asked for."
        )


def answer_too_long(url: str, limit_bytes: int) -> ModelError:
    """Return the error for an answer beyond the limit."""
    return malformed(f"{url} answered more than {limit_bytes / 2**20:g} MiB; reading stopped.")


def _error_for_status(
    status: int, detail: str, *, body: Any, url: str, retry_after: float | None
) -> ModelError:
    codes = _codes_in(body)
    message = f"{url} answered {status}: {detail}" if detail else f"{url} answered {status}"
    if status == 429:
        # An exhausted account is also a 429, but waiting does not help.
        if "insufficient_quota" in codes:
            return ModelBadRequest(message, code="insufficient_quota")
        return ModelRateLimit(message, retry_after_s=retry_after)
    if status >= 500 or status in RETRYABLE_4XX:
        return ModelTransportError(message, code=f"http_{status}", retry_after_s=retry_after)
    if status in (400, 413, 422) and _OVERFLOW.search(f"{detail} {codes}"):
        return ContextOverflow(message)
    return ModelBadRequest(f"{message}{_remedy(status)}", code=f"http_{status}")


def _remedy(status: int) -> str:
    if status in (401, 403):
        return " Check the API key of this endpoint."
    if status == 404:
        return " Check the model's name and that the base URL ends where /chat/completions begins."
    if 300 <= status < 400:
        return " Redirects are not followed: set the base URL to the final address."
    return ""


def _message_in(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("detail") or error.get("object") or error
    return _shorten(str(error))


def _codes_in(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return ""
    return f"{error.get('code') or ''} {error.get('type') or ''}"


def _embedded_status(error: Any) -> int | None:
    code = error.get("code", error.get("status")) if isinstance(error, Mapping) else None
    number = _number(str(code)) if isinstance(code, int | str) else None
    return int(number) if number is not None and 400 <= number < 600 else None


def _json_or_none(body: bytes) -> Any:
    try:
        return parse_json(body)
    except JsonError:
        return None


def _excerpt(body: bytes) -> str:
    return _shorten(body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace"))


def _shorten(text: str) -> str:
    flat = " ".join(text[: 4 * EXCERPT_CHARS].split())
    return flat if len(flat) <= EXCERPT_CHARS else f"{flat[:EXCERPT_CHARS]}…"


def _number(value: str | None) -> float | None:
    try:
        number = float(value) if value else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < float("inf") else None
