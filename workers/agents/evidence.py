"""The evidence of a test run: the record of `evidence_probe` and the verdict that follows from it.

Used by `coding_verdict`. Pure: it composes the command and reads the record, and runs nothing. A
record comes from the process in which the model's code runs, so it is read as untrusted data. Must
not: take an exit code of 0 for a pass where a record is expected.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from workers.sandbox.base import CommandResult

TestRunner = Literal["auto", "pytest", "unittest", "none"]

_PYTEST = re.compile(r"(?:^|[\s;&|(/])(?:pytest|py\.test)(?=$|[\s;&|)])")
_UNITTEST = re.compile(r"(?<=-m)(\s+)unittest(?=$|[\s;&|)])")
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """The probe of one test run: a folder with a module and its record, both with random names."""

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def folder(self) -> str:
        """The folder below the sandbox's root."""
        return f".rollout-{self.token}"

    @property
    def files(self) -> dict[str, str]:
        """Path to content of the files that must be written before the tests run."""
        return {f"{self.folder}/rollout_{self.token}.py": _probe_source(), self.record: ""}

    @property
    def record(self) -> str:
        """The path of the record."""
        return f"{self.folder}/record"

    def instrument(self, command: str, root: str) -> str:
        """Return the shell command that runs the tests under the probe."""
        folder = shlex.quote(f"{root}/{self.folder}")
        record = shlex.quote(f"{root}/{self.record}:{self.key}")
        module = f"rollout_{self.token}"
        probed = _UNITTEST.sub(lambda found: found[1] + module, command)
        return (
            f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} ROLLOUT_EVIDENCE={record} "
            f'PYTEST_ADDOPTS="-p {module} $PYTEST_ADDOPTS"\n'
            f"{probed}"
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """The record of a run.

    Args:
        started: Sessions of a test runner that began.
        finished: Sessions that ended in order.
        outcomes: Test to `passed`, `failed` or `skipped`; a module that cannot be read to `error`.
        skipped_in: Test to the files through which its skip passed.
        is_sound: Whether a test that must fail failed in every session.
        python: Version and path of the interpreter.
    """

    started: int = 0
    finished: int = 0
    outcomes: Mapping[str, str] = field(default_factory=dict)
    skipped_in: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_sound: bool = True
    python: str = ""

    @property
    def has_started(self) -> bool:
        """Whether tests ran, or at least their modules were found."""
        return self.started > self.finished or bool(self.outcomes)

    @property
    def has_run(self) -> bool:
        """Whether tests ran; not if no module of them could be read."""
        return self.started > self.finished or any(
            outcome != "error" for outcome in self.outcomes.values()
        )

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests by outcome."""
        return dict(Counter(self.outcomes.values()))


class _Line(BaseModel):
    key: str
    event: Literal["started", "finished"]
    outcomes: dict[str, Literal["passed", "failed", "error", "skipped"]] = {}
    skipped_in: dict[str, list[str]] = {}
    is_sound: bool = True
    python: str = ""


def runner_of(command: str, setting: TestRunner) -> str | None:
    """Return the test runner that leaves a record; None where only the exit code counts."""
    if setting != "auto":
        return None if setting == "none" else setting
    if _UNITTEST.search(command):
        return "unittest"
    return "pytest" if _PYTEST.search(command) else None


def read_record(data: bytes, key: str) -> Evidence:
    """Return the content of a record; lines that the probe did not write are left out."""
    read = map(_read_line, data.splitlines())
    lines = [line for line in read if line and line.key == key]
    finished = [line for line in lines if line.event == "finished"]
    return Evidence(
        started=len(lines) - len(finished),
        finished=len(finished),
        outcomes={test: end for line in finished for test, end in line.outcomes.items()},
        skipped_in={test: files for line in finished for test, files in line.skipped_in.items()},
        is_sound=all(line.is_sound for line in finished),
        python=lines[0].python[:200] if lines else "",
    )


def decide_failure(
    result: CommandResult,
    evidence: Evidence | None,
    *,
    changed: Sequence[str],
    required: Sequence[str],
) -> str:
    """Return the reason why a run is no pass; empty if it is one.

    Args:
        result: The end of the test command.
        evidence: The record; None where only the exit code counts.
        changed: Paths that the diff changes, below the root.
        required: Tests that must pass. With them, failures of other tests do not matter.
    """
    if result.timed_out:
        return "the tests did not end in time"
    if evidence is None:
        return "" if result.exit_code == 0 else f"the command ended with {result.exit_code}"
    if not evidence.has_started:
        return "no test ran"
    if evidence.finished != evidence.started:
        return "the tests' process ended before its tests did"
    if not evidence.is_sound:
        return "a test that must fail passed: the assertions were tampered with"
    passed = [test for test, outcome in evidence.outcomes.items() if outcome == "passed"]
    if missing := sorted(set(required).difference(passed)):
        return f"required tests did not pass: {_named(missing)}"
    if skipped := _skipped_by(changed, evidence):
        return f"the changed code skipped tests: {_named(skipped)}"
    if required:
        return ""
    if failed := sorted(t for t, end in evidence.outcomes.items() if end in ("failed", "error")):
        return f"tests failed: {_named(failed)}"
    if not passed:
        return "no test passed"
    return "" if result.exit_code == 0 else f"the command ended with {result.exit_code}"


def _skipped_by(changed: Sequence[str], evidence: Evidence) -> list[str]:
    ends = tuple(f"/{path}" for path in changed)
    return sorted(
        test
        for test, files in evidence.skipped_in.items()
        if ends and any(f"/{file}".endswith(ends) for file in files)
    )


def _named(tests: Sequence[str]) -> str:
    more = f" and {len(tests) - _NAMED} more" if len(tests) > _NAMED else ""
    return ", ".join(tests[:_NAMED]) + more


def _read_line(data: bytes) -> _Line | None:
    try:
        return _Line.model_validate(json.loads(data))
    except (ValueError, ValidationError):
        return None


@cache
def _probe_source() -> str:
    return Path(__file__).with_name("evidence_probe.py").read_text(encoding="utf-8")
