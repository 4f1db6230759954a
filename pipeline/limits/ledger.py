"""The book of one endpoint's limits: what a process asks of it, and what it answers.

`Limiter` asks; `memory.py` keeps the book in this process, `redis_ledger.py` in Redis, where all
processes share it. One `sync` does everything at once: it reports what ended, what is held and who
waits, and brings back reserved slots. Values only: no I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from pipeline.contract.errors import ServiceUnavailable
from pipeline.limits.settings import LimitSettings


class LedgerUnavailable(ServiceUnavailable):
    """The ledger does not answer; calls wait until it does."""

    code = "E205"


class Reason(StrEnum):
    """Why a call waits."""

    NONE = ""
    REQUESTS = "requests"  #: requests per minute are used up
    TOKENS = "tokens"  #: tokens per minute are used up
    CONCURRENCY = "concurrency"  #: as many calls in flight as are allowed
    SHARE = "share"  #: other runs or workers are behind their share
    BACKOFF = "backoff"  #: the endpoint asked for a pause (429)


class Demand(NamedTuple):
    """One run's callers in this process that have no slot yet."""

    run: str
    weight: float
    waiting: int
    estimates: tuple[int, ...]  #: tokens of the first of them, in order


class Returned(NamedTuple):
    """A reserved slot that nobody needs any more; `at` in the ledger's clock."""

    run: str
    at: float
    tokens: int


class Outcomes(NamedTuple):
    """How the calls ended since the last ask."""

    ok: int = 0
    congested: int = 0  #: 429 or timeout
    latency_sum_s: float = 0.0  #: of the calls that ended well


@dataclass(frozen=True, slots=True)
class Ask:
    """Everything a process tells the ledger at once.

    `held` is absolute, never a difference: an answer that got lost, or a ledger that lost its
    memory, is put right by the next ask.
    """

    process: str
    lease_s: float = 15.0
    version: int = 0
    wide_version: int = 0  #: of the limits of the whole endpoint
    held: int = 0
    demands: tuple[Demand, ...] = ()
    returned: tuple[Returned, ...] = ()
    tokens_owed: int = 0  #: used minus estimated; negative is a refund
    outcomes: Outcomes = field(default_factory=Outcomes)
    backoff_s: float | None = None  #: a 429 was seen; seconds asked for, 0 when it named none


class Grant(NamedTuple):
    """A slot reserved for the demand of that index, `delay_s` after the answer's `now`."""

    demand: int
    delay_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the ledger gives and knows."""

    now: float
    version: int = 0  #: of the limits in force; 0 when none were ever set
    settings: LimitSettings | None = None  #: given when the asker's version is another
    wide_version: int = 0  #: of the limits of the whole endpoint, the same for all its models
    wide_settings: LimitSettings | None = None
    is_wide: bool = False  #: whether the endpoint's limits gave the reason; the numbers are theirs
    grants: list[Grant] = field(default_factory=list)
    retry_in_s: float = 0.0
    reason: Reason = Reason.NONE
    pause_s: float = 0.0  #: what is left of a back-off
    waiting: int = 0
    in_flight: int = 0
    cap: int = 0  #: concurrency allowed now; 0 for any
    is_contended: bool = False  #: somebody was lately refused for want of concurrency
    granted: int = 0
    calls: int = 0
    unused_s: float | None = None  #: since limits were set without a call counted under them


class Ledger(Protocol):
    """Where the limits of one endpoint and model are kept, with those of the whole endpoint."""

    @property
    def calls(self) -> int:
        """Count the asks of this process so far."""
        ...

    async def sync(self, ask: Ask) -> Answer:
        """Report and ask in one step.

        Raises:
            LedgerUnavailable: it does not answer; the ask may or may not have been booked.
        """
        ...

    async def restore(self, settings: LimitSettings) -> bool:
        """Set these limits where the ledger knows of none; say whether it did."""
        ...

    async def restore_wide(self, settings: LimitSettings) -> bool:
        """Set these limits of the whole endpoint where the ledger knows of none."""
        ...
