"""The mock LLM with a history, storms of 429 and calls that are never answered.

Own process (`python -m benchmarks.faults.model_server`), a child of the deployment. Errors and
latency are drawn from a seed by rollout, turn and try, as `benchmarks.mock_behaviour` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from dataclasses import fields
from hashlib import blake2b
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.faults.histories import History
from benchmarks.mock_answers import http_response
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_calls import Call, MockLLM
from benchmarks.mock_llm import serve

ACTOR = "model"

#: Longer than anybody waits: such a call is never answered.
_NEVER_S = 1e6
_UNIT = 1 / 2**32
_TOKENS = re.compile(rb'"total_tokens":\s*(\d+)')


class StormyModel(MockLLM):
    """Answers as the mock does, notes every call, and has bad times when told to.

    `POST /weather {"storm_s": 3, "storm_share": 0.8, "silent_share": 0.1}`: for so long, that share
    of calls gets a 429; from now on, that share of first tries gets no answer at all.
    """

    def __init__(self, behaviour: MockBehaviour, history: History) -> None:
        self._history = history
        self._storm_until = 0.0
        self._storm_share = 0.0
        self._silent_share = 0.0
        super().__init__(behaviour)

    def open_call(self, identity: str | None, body: bytes, now: float) -> Call:
        """Count and note a call; it may meet a storm, or silence."""
        call = super().open_call(identity, body, now)
        draw = self._draw(f"{identity}/{call.turn}/{self.ledger.calls}")
        if now < self._storm_until and draw < self._storm_share:
            call.status, call.response, call.due_at = 429, self.errors[429], now
        elif call.status == 200 and draw > 1 - self._silent_share:
            call.due_at = now + _NEVER_S
        answered = call.due_at < now + _NEVER_S / 2
        self._history.note(
            "call",
            rollout=identity,
            turn=call.turn,
            status=call.status if answered else 0,
            tokens=_tokens_of(call.response),
        )
        return call

    def control(self, method: bytes, target: str, body: bytes) -> bytes:
        """Answer everything that is not a model call."""
        if urlsplit(target).path != "/weather":
            return super().control(method, target, body)
        weather: dict[str, Any] = json.loads(body)
        self._storm_until = monotonic() + weather.get("storm_s", 0.0)
        self._storm_share = weather.get("storm_share", 0.0)
        self._silent_share = weather.get("silent_share", 0.0)
        return http_response("200 OK", weather)

    def _draw(self, key: str) -> float:
        digest = blake2b(f"{self.behaviour.seed}/{key}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") * _UNIT


def _tokens_of(response: bytes) -> int:
    found = _TOKENS.search(response)
    return int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="model_server")
    for field in fields(MockBehaviour):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default)
    behaviour = MockBehaviour(**vars(parser.parse_args()))
    model = StormyModel(behaviour, History.of_environment(ACTOR))
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(model, port=0, until_stdin_closes=True))


if __name__ == "__main__":
    main()
