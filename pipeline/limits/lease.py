"""Leave to make one call, and the account a process keeps of its calls between two asks.

`Limiter` makes leases; a model client settles and releases them. No I/O: the account goes to the
ledger with the next ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from pipeline.limits.ledger import Outcomes

Outcome = Literal["ok", "rate_limited", "timeout", "error"]


@dataclass(slots=True)
class Account:
    """What is in use, and what is to be told to the ledger."""

    in_use: int = 0
    tokens_owed: int = 0
    ok: int = 0
    congested: int = 0
    latency_sum_s: float = 0.0

    def take(self) -> tuple[int, Outcomes]:
        """Give what is to be told, and start anew."""
        told = self.tokens_owed, Outcomes(self.ok, self.congested, self.latency_sum_s)
        self.tokens_owed = self.ok = self.congested = 0
        self.latency_sum_s = 0.0
        return told

    def take_back(self, tokens_owed: int) -> None:
        """Tell a charge again that may not have arrived; a refund is not worth being paid twice."""
        self.tokens_owed += max(0, tokens_owed)


@dataclass(eq=False, slots=True)
class Lease:
    """Leave to make one call; `release` ends it. As a context manager it cannot be forgotten."""

    run: str
    tokens: int  #: charged so far
    granted_at: float  #: in the event loop's clock
    waited_s: float
    _account: Account
    _changed: Callable[[], None]
    _is_open: bool = field(default=True)

    async def settle(self, actual_tokens: int) -> None:
        """Replace the estimate by the tokens the call really used."""
        self._account.tokens_owed += actual_tokens - self.tokens
        self.tokens = actual_tokens
        self._changed()

    async def release(self, outcome: Outcome = "ok", latency_s: float | None = None) -> None:
        """End the call; further releases change nothing.

        A call that was refused (429) used no tokens: its estimate is refunded. Without a latency,
        the time since the grant is taken for it.
        """
        if not self._is_open:
            return
        self._is_open = False
        account = self._account
        account.in_use -= 1
        if outcome == "ok":
            account.ok += 1
            account.latency_sum_s += self._age_s() if latency_s is None else latency_s
        elif outcome in ("rate_limited", "timeout"):
            account.congested += 1
        if outcome == "rate_limited":
            account.tokens_owed -= self.tokens
            self.tokens = 0
        self._changed()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.release("error" if error else "ok")

    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self.granted_at
