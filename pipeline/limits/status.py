"""How limits are named and shown: one row per endpoint and model.

Used by `LimitStore` and `rollout limits show`. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit, urlunsplit

from pipeline.contract.errors import InputError
from pipeline.limits.settings import LimitSettings

#: Stands for the model where limits are those of a whole endpoint.
ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The limits of one endpoint and model, and how they are used now."""

    endpoint: str
    model: str
    settings: LimitSettings | None  #: None: none were ever set
    granted: int  #: since the first call
    waiting: int
    in_flight: int
    backing_off_until: datetime | None
    cap: int | None  #: calls in flight allowed now, the adaptive cap included
    unused_s: float | None  #: time since limits were set, if no call was counted since


def endpoint_key(endpoint: str, model: str) -> tuple[str, str]:
    """Return endpoint and model under one name each, however the URL is written.

    Credentials are removed from the URL.

    Raises:
        InputError: The endpoint or the model is empty.
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
