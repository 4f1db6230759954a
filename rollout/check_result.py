"""The result of one of `rollout doctor`'s checks.

`checks.py` and `endpoint_checks.py` use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.contract.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""
    exit_code: int = 0


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """Return the result of a check; its error becomes a failed check of this name."""
    try:
        return check()
    except PipelineError as error:
        return failed(name, error)


def failed(name: str, error: PipelineError) -> Check:
    """Return a failed check with the error's text, remedy and exit code."""
    detail = " ".join(part for part in (error.code, error.what, error.why) if part)
    return Check(name, "failed", detail, error.remedy, error.exit_code)
