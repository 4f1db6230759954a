"""The mock LLM server as a child process: start, configure, read its counts, stop.

The benchmark runs, the fault campaign and the tests use it. The child ends when its parent ends for
any reason. Must not: depend on the measured system.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.mock_behaviour import MockBehaviour

ROOT = Path(__file__).resolve().parent.parent
_ANSWER_TIMEOUT_S = 30


class MockServer:
    """A running mock server; a context manager."""

    def __init__(
        self,
        behaviour: MockBehaviour | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        fields = json.dumps(behaviour.to_json() if behaviour else {})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mock_llm", fields],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the mock LLM server ended with {self._process.wait()} at its start"
            )
        ready = json.loads(line)
        self.pid: int = ready["pid"]
        self.port: int = ready["port"]
        self.base_url: str = ready["base_url"]

    def reset(self, behaviour: MockBehaviour | None = None) -> None:
        """Start a new count, with another behaviour if one is given."""
        body = json.dumps(behaviour.to_json()).encode() if behaviour else b""
        self._ask("/reset", body)

    def stats(self, *, expected: int | None = None) -> dict[str, Any]:
        """Return the server's counts since the last reset."""
        return self._ask("/stats" if expected is None else f"/stats?expected={expected}")

    def disturb(self, **values: float) -> None:
        """Inject failures for a while, see `MockLLM`; without values injection stops."""
        self._ask("/disturb", json.dumps(values).encode())

    def close(self) -> None:
        """Stop the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=_ANSWER_TIMEOUT_S)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = Request(f"http://127.0.0.1:{self.port}{path}", data=body)
        try:
            with urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
                return json.loads(response.read())
        except HTTPError as error:
            with error:
                raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from None
