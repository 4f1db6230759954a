"""The workloads of the benchmark, as values.

The bare loops, `MockServer` and the pipeline's subject use them, so that all run the same rollouts
against the same answers. Must not: start a process or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.mock_answers import FINAL_ANSWER
from benchmarks.mock_behaviour import MockBehaviour

QUESTION = "What is 17 times 23, and 9 more? Use the calculator."


@dataclass(frozen=True, slots=True)
class Workload:
    """The number of rollouts, the concurrency, and the behaviour of the LLM."""

    name: str
    behaviour: MockBehaviour
    rollouts: int = 1000
    in_flight: int = 500
    client_retries: int = 2

    @property
    def ideal_s(self) -> float:
        """Wall time if only the median latency took time; 0 for W0."""
        waves = math.ceil(self.rollouts / self.in_flight)
        return waves * self.behaviour.turns * self.behaviour.latency_ms / 1000

    def resized(self, *, rollouts: int | None = None, in_flight: int | None = None) -> Workload:
        """The same behaviour at another size."""
        return replace(
            self, rollouts=rollouts or self.rollouts, in_flight=in_flight or self.in_flight
        )

    def rows(self) -> Iterator[dict[str, str]]:
        """Yield one dataset row per rollout; `prompt` contains the marker that the mock counts."""
        for number in range(self.rollouts):
            yield {"prompt": f"{QUESTION} [row {number}]", "answer": FINAL_ANSWER}


def label(run: str, number: int) -> str:
    """Return the label of a rollout, in the form of the pipeline's labels."""
    return f"{run}-g{number:06d}-r0"


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W0", MockBehaviour()),
        Workload("W1", MockBehaviour(latency_ms=100)),
        Workload("W1s", MockBehaviour(latency_ms=1000)),
        Workload("W2", MockBehaviour(latency_ms=100, sigma=1.0, error_rate=0.1), client_retries=10),
        # Long conversations of which the server returns all ids with every call.
        Workload(
            "W3",
            MockBehaviour(turns=50, context_tokens=32_768),
            rollouts=500,
            in_flight=100,
        ),
    )
}
