"""The limiter that a model client uses: permission to call, and a report afterwards.

Model clients take any object with these methods, such as `RunLimiter` and `LocalPause` of
`pipeline/limits`. Must not: import those classes, or know the limits.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Literal, Protocol

#: The result of a call: answered, rejected with 429, no answer in time, or any other error.
CallStatus = Literal["ok", "rate_limited", "timeout", "error"]


class CallLease(Protocol):
    """Permission for one call; `settle` ends it and is called exactly once."""

    def settle(self, actual_tokens: int, outcome: CallStatus) -> Awaitable[None] | None:
        """Replace the estimate by the tokens that the call used, and release the slot."""
        ...


class CallLimiter(Protocol):
    """The request, token and concurrency limits of one endpoint, shared by all its callers."""

    async def acquire(self, estimated_tokens: int) -> CallLease | None:
        """Wait until a call of about this size may be made; None: nothing is to be settled."""
        ...

    def note_rate_limited(self, retry_after_s: float | None) -> Awaitable[None] | None:
        """Report a 429 of the endpoint to all its callers."""
        ...
