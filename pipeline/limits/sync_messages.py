"""The messages of a sync: what a process reports to Redis and asks for, and the reply.

`Limiter` makes requests, `grant.lua` answers them, `SharedLimits` carries both. The script reads
and writes the fields by these names. Values only: no I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pipeline.limits.settings import LimitSettings


class WaitReason(StrEnum):
    """Why a call waits."""

    NONE = ""
    REQUESTS = "requests"  #: requests per minute are used up
    TOKENS = "tokens"  #: tokens per minute are used up
    CONCURRENCY = "concurrency"  #: as many calls in flight as are allowed
    SHARE = "share"  #: other runs or workers are behind their share
    BACKOFF = "backoff"  #: a pause after 429s


@dataclass(frozen=True, slots=True)
class Demand:
    """The callers of one run in this process that have no slot yet."""

    run: str
    weight: float
    waiting: int
    estimates: tuple[int, ...]  #: tokens of the first callers, in order


@dataclass(frozen=True, slots=True)
class ReturnedSlot:
    """A reserved slot that no caller needs any more; `at` in the server's clock."""

    at: float
    tokens: int


@dataclass(slots=True)
class Usage:
    """Counts of the calls that ended since the last sync."""

    ok: int = 0
    congested: int = 0  #: 429 or timeout
    latency_sum_s: float = 0.0  #: of the calls that ended well
    tokens_owed: int = 0  #: used minus estimated; negative is a refund


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """Report and demands of one process.

    `held` is absolute, not a difference, so the next sync repairs a lost reply and a Redis that
    lost its memory.
    """

    process: str
    lease_s: float = 15.0
    version: int = 0
    endpoint_version: int = 0  #: of the limits of the whole endpoint
    held: int = 0
    demands: tuple[Demand, ...] = ()
    returned: tuple[ReturnedSlot, ...] = ()
    usage: Usage = field(default_factory=Usage)
    backoff_s: float | None = None  #: pause to begin after 429s; 0 where the endpoint named none


class Grant(NamedTuple):
    """A slot reserved for the demand of that index, `delay_s` after the reply's `now`."""

    demand: int
    delay_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SyncReply:
    """Granted slots and the state of the limits."""

    now: float
    version: int = 0  #: of the limits in force; 0 where none were ever set
    settings: LimitSettings | None = None  #: present if the version differs from the request's
    endpoint_version: int = 0  #: of the limits of the whole endpoint, the same for all its models
    endpoint_settings: LimitSettings | None = None
    grants: list[Grant] = field(default_factory=list)
    retry_in_s: float = 0.0
    reason: WaitReason = WaitReason.NONE
    pause_s: float = 0.0  #: rest of a pause after 429s
    # The next four describe the limits that gave the reason: the model's or the endpoint's.
    waiting: int = 0
    in_flight: int = 0
    cap: int = 0  #: concurrency allowed now; 0 for any
    is_contended: bool = False  #: a call was refused lately because of the cap
    granted: int = 0
    calls: int = 0
    unused_s: float | None = None  #: time since limits were set, if no call was counted since
