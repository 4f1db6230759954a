"""The limiter that a model client uses: permission to call, and a report afterwards.

Model clients take any object of this shape; `RunLimiter` and `LocalPause` of `pipeline/limits` have
it. Must not import them or know the limits.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Literal, Protocol

#: What became of a call: answered, refused with 429, no answer in time, or anything else.
CallStatus = Literal["ok", "rate_limited", "timeout", "error"]


class CallLease(Protocol):
    """Leave to make one call; `settle` ends it and is called exactly once."""

    def settle(self, actual_tokens: int, outcome: CallStatus) -> Awaitable[None] | None:
        """Replace the estimate by what the call really used, and give the slot back."""
        ...


class CallLimiter(Protocol):
    """Requests, tokens and concurrency of one endpoint, shared by all who call it."""

    async def acquire(self, estimated_tokens: int) -> CallLease:
        """Wait until a call of about this size may be made."""
        ...

    def note_rate_limited(self, retry_after_s: float | None) -> Awaitable[None] | None:
        """Tell everybody that the endpoint answered 429."""
        ...
