"""The progress of a coding trajectory: its phases, the files it has viewed, its failed attempts.

Computed from the trajectory's steps by the coding agents, which keep no state of their own. Must
not: decide the agent's next action.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

_TEST_COMMAND = re.compile(
    r"\b(pytest|unittest|nose2|tox|(npm|yarn|pnpm|make|cargo|go|mvn|gradle|bazel) (run )?test)\b"
)
_EDITS = ("create", "str_replace", "insert", "undo_edit")


class Phase(StrEnum):
    """The phases of a coding trajectory, in their usual order."""

    UNDERSTANDING = "understanding"
    EXPLORATION = "exploration"
    IMPLEMENTATION = "implementation"
    TESTING = "testing"
    REFINEMENT = "refinement"


@dataclass
class CodingProgress:
    """The progress of a trajectory; an attempt is a run of the tests after an edit."""

    phases: list[Phase] = field(default_factory=lambda: [Phase.UNDERSTANDING])
    explored: set[str] = field(default_factory=set)
    failed_attempts: int = 0
    has_edited: bool = False  #: since the last test run

    def enter(self, phase: Phase) -> None:
        """Record the phase of the latest action."""
        if phase is not self.phases[-1]:
            self.phases.append(phase)


def read_progress(trajectory: Trajectory, test_command: str | None = None) -> CodingProgress:
    """Compute the progress of a trajectory from its tool results."""
    progress = CodingProgress()
    for step in trajectory.steps:
        if step.step_type is StepType.ACTION_RESULT and step.tool_name:
            _record_result(progress, step, step.tool_args or {}, test_command)
    return progress


def explored_path(tool_name: str | None, args: dict[str, Any]) -> str | None:
    """Return the file that a call views; None for any other call."""
    if tool_name == "file_editor" and args.get("command") == "view":
        return str(args.get("path"))
    return None


def is_edit(tool_name: str | None, args: dict[str, Any]) -> bool:
    """Say whether a call changes a file through the editor."""
    return tool_name == "file_editor" and args.get("command") in _EDITS


def _record_result(
    progress: CodingProgress, step: TrajectoryStep, args: dict[str, Any], test_command: str | None
) -> None:
    succeeded = bool(step.metadata.get("execution_successful"))
    if path := explored_path(step.tool_name, args):
        if succeeded:
            progress.explored.add(path)
        _explore(progress)
    elif is_edit(step.tool_name, args):
        if succeeded:
            progress.has_edited = True
            failed = progress.failed_attempts > 0
            progress.enter(Phase.REFINEMENT if failed else Phase.IMPLEMENTATION)
    elif step.tool_name == "search":
        _explore(progress)
    elif step.tool_name == "bash_executor" and _is_test(str(args.get("command")), test_command):
        progress.enter(Phase.TESTING)
        progress.failed_attempts += progress.has_edited and not succeeded
        progress.has_edited = False


def _explore(progress: CodingProgress) -> None:
    if progress.phases[-1] is Phase.UNDERSTANDING:
        progress.enter(Phase.EXPLORATION)


def _is_test(command: str, test_command: str | None) -> bool:
    return bool(test_command and test_command in command) or bool(_TEST_COMMAND.search(command))
