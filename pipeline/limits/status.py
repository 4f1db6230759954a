"""How limits are named and shown: one row per endpoint and model.

Used by both stores and by `rollout limits show`. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit, urlunsplit

from pipeline.contract.errors import InputError
from pipeline.limits.in_force import LimitsInForce
from pipeline.limits.ledger import Answer, Reason
from pipeline.limits.settings import LimitSettings

#: Stands for the model where limits are those of a whole endpoint.
ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The limits of one endpoint and model, and how they are used now."""

    endpoint: str
    model: str
    settings: LimitSettings | None  #: `None` when none were ever set
    granted: int  #: since the ledger began
    calls: int  #: of the ledger, since it began
    waiting: int
    in_flight: int
    backing_off_until: datetime | None
    cap: int | None  #: calls in flight allowed now, the adaptive cap included
    unused_s: float | None  #: since they were set without a call counted; None: some were

    @classmethod
    def of(cls, endpoint: str, model: str, answer: Answer, pause_until: datetime) -> LimitStatus:
        """Make a row of a ledger's answer; it must have been asked with version 0."""
        return cls(
            endpoint=endpoint,
            model=model,
            settings=answer.settings,
            granted=answer.granted,
            calls=answer.calls,
            waiting=answer.waiting,
            in_flight=answer.in_flight,
            backing_off_until=pause_until if answer.pause_s > 0 else None,
            cap=answer.cap or None,
            unused_s=answer.unused_s,
        )


def endpoint_key(endpoint: str, model: str) -> tuple[str, str]:
    """Give one name for an endpoint, however its URL is written, without credentials.

    Raises:
        InputError: the endpoint or the model is empty.
    """
    parts = urlsplit(endpoint.strip())
    host = parts.netloc.rpartition("@")[2].lower()
    name = urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))
    if not name or not model.strip():
        raise InputError(
            "Limits are kept per endpoint and model, and one of them is empty.",
            why=f"endpoint={name!r} model={model!r}",
            remedy="Name both.",
        )
    return name, model.strip()


_REASONS = {
    Reason.NONE: "the next answer is on its way",
    Reason.REQUESTS: "its {settings.requests_per_minute} requests per minute are used up",
    Reason.TOKENS: "its {settings.tokens_per_minute} tokens per minute are used up",
    Reason.CONCURRENCY: "{last.in_flight} of {last.cap} allowed calls are in flight",
    Reason.SHARE: "other runs or workers have had less than their share",
    Reason.BACKOFF: "it asked everybody to slow down (429)",
}


def explain_wait(
    name: str,
    *,
    waiting_here: int,
    last: Answer | None,
    limits: LimitsInForce,
    outage: Exception | None,
    pause_s: float,
    next_look_s: float,
) -> str:
    """Say in a sentence or two what calls wait for."""
    if outage is not None:
        return f"{waiting_here} calls wait for {name}: {outage}"
    if last is None:
        return f"{waiting_here} calls wait for {name}: its limits are being read."
    if pause_s > 0:
        cause = f"{_REASONS[Reason.BACKOFF]}; calls go on in {pause_s:.1f} s"
    elif waiting_here == 0:
        return f"No call waits for {name}."
    else:
        settings = limits.wide_settings if last.is_wide else limits.settings
        cause = _REASONS[last.reason].format(settings=settings, last=last)
        if last.is_wide and last.reason is not Reason.SHARE:
            cause += ", over all models of the endpoint"
    return (
        f"{waiting_here} calls wait for {name}: {cause}. "
        f"{last.waiting} wait in all workers; next look in {next_look_s:.1f} s."
    )
