"""Who may go next when several runs, and several workers of a run, want the same limit.

Mirrored by `fair_share.lua`; used by `memory.py`. Start-time fair queueing: a *flow* is one run in
one process; its tag is the service it has had, in seconds of capacity over its weight. Only flows
with callers waiting count, and none may run ahead of the last of them by more than its share of
the horizon. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Flow = tuple[str, str]  #: run, process


@dataclass(slots=True)
class _Run:
    weight: float
    flows: int = 0


@dataclass(slots=True)
class FairShare:
    """Tags of the waiting flows, and of those that stopped waiting while ahead."""

    virtual: float = 0.0
    waiting: dict[Flow, int] = field(default_factory=dict)
    _tags: dict[Flow, float] = field(default_factory=dict)
    _idle: dict[Flow, float] = field(default_factory=dict)
    _runs: dict[str, _Run] = field(default_factory=dict)

    def tell(self, flow: Flow, *, weight: float, waiting: int) -> None:
        """Note how many callers of a flow wait; a flow that waits again keeps its lead."""
        if waiting > 0:
            if flow not in self.waiting:
                self._join(flow, weight)
            self._runs[flow[0]].weight = weight
            self.waiting[flow] = waiting
        elif flow in self.waiting:
            self.leave(flow)

    def leave(self, flow: Flow) -> None:
        """Stop counting a flow: it has no callers waiting, or its process went silent."""
        del self.waiting[flow]
        self._idle[flow] = self._tags.pop(flow)
        run = self._runs[flow[0]]
        run.flows -= 1
        if run.flows == 0:
            del self._runs[flow[0]]

    def advance(self) -> None:
        """Move virtual time up to the flow that is furthest behind."""
        if self._tags:
            self.virtual = max(self.virtual, min(self._tags.values()))

    def forget_overtaken(self) -> None:
        """Drop the leads that nobody can have any more."""
        self._idle = {flow: tag for flow, tag in self._idle.items() if tag > self.virtual}

    def tag(self, flow: Flow) -> float:
        """Give the service a waiting flow has had."""
        return self._tags[flow]

    def rank(self, flow: Flow) -> int:
        """Count the waiting flows that go before this one."""
        mine = (self._tags[flow], flow)
        return sum((tag, other) < mine for other, tag in self._tags.items())

    def lead(self, horizon_s: float) -> float:
        """Give how far a flow may be ahead: everybody's share of the horizon at once."""
        return horizon_s / sum(run.weight for run in self._runs.values())

    def charge(self, flow: Flow, cost_s: float) -> None:
        """Book service for a waiting flow."""
        run = self._runs[flow[0]]
        self._tags[flow] += cost_s * run.flows / run.weight

    def _join(self, flow: Flow, weight: float) -> None:
        self.advance()
        self._tags[flow] = max(self.virtual, self._idle.pop(flow, 0.0))
        self._runs.setdefault(flow[0], _Run(weight)).flows += 1
