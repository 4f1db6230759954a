"""The stormy model as a child of the deployment: started, asked, told the weather, stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.faults.processes import ROOT
from benchmarks.mock_behaviour import MockBehaviour

_ANSWER_TIMEOUT_S = 30


class ModelProcess:
    """A running model server; it ends with its parent, whatever ends that one."""

    def __init__(self, behaviour: MockBehaviour, environment: Mapping[str, str]) -> None:
        flags = [
            part
            for name, value in behaviour.to_json().items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.model_server", *flags],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the model server ended with {self._process.wait()} at its start")
        self.base_url: str = json.loads(line)["base_url"]

    def weather(self, **values: float) -> None:
        """Begin a storm, or silence; without values the weather is good again."""
        self._ask("/weather", json.dumps(values).encode())

    def stats(self) -> dict[str, Any]:
        """Return what the server counted."""
        return self._ask("/stats")

    def close(self) -> None:
        """Stop the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=_ANSWER_TIMEOUT_S)
        self._process.stdout.close()

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = Request(self.base_url.removesuffix("/v1") + path, data=body)
        with urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
            return json.loads(response.read())
