"""Permission to make one call.

`Limiter` makes leases and counts how their calls end; a model client settles each lease once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CallStatus = Literal["ok", "rate_limited", "timeout", "error"]


@dataclass(eq=False, slots=True)
class Lease:
    """Permission to make one call; counts as in flight until it is settled."""

    tokens: int  #: charged so far
    granted_at: float  #: in the event loop's clock
    _on_end: Callable[[Lease, int, CallStatus], None]
    _is_open: bool = True

    def settle(self, actual_tokens: int, outcome: CallStatus = "ok") -> None:
        """End the call and replace its estimate by the tokens used; a repetition does nothing."""
        if self._is_open:
            self._is_open = False
            self._on_end(self, actual_tokens, outcome)
