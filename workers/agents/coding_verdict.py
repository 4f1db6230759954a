"""The verdict of a coding task: its tests on a clean copy of the task plus the model's diff.

Used by the coding agents after the model's work, and by `task_check`. The clean copy is a sandbox
of its own, so files that the model wrote outside the repository, and its changes of the container,
do not count. Must not: give a verdict where the tests cannot start on the clean copy alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from workers.agents.coding_task import CodingTask, TaskError, prepare_task, write_files
from workers.agents.evidence import (
    Evidence,
    Probe,
    decide_failure,
    read_record,
    runner_of,
)
from workers.agents.task_diff import DiffRefused, apply_diff, restore
from workers.sandbox.base import CommandResult, Sandbox
from workers.sandbox.shared import SandboxSettings

MAX_OUTPUT_CHARS = 8000
NO_GIT = (
    "The tests run on a clean copy of the task plus the model's diff. That needs git, which the "
    "sandbox does not have. Use an image with git."
)
_MOST_CONTROLS = 1000
#: Exit codes of a shell that could not execute a program.
_NOT_EXECUTED = (126, 127)


@dataclass(frozen=True)
class TestVerdict:
    """The result of the task's tests.

    Args:
        passed: Whether the reward is 1.
        reason: The reason of a reward of 0; empty for a pass.
        exit_code: Of the test command; 1 if it did not run.
        timed_out: Whether the test command ran out of time.
        output: The end of the test command's output.
        counts: The number of tests by outcome; empty without a record.
        left_out: Paths of the diff that did not count.
        python: Version and path of the interpreter; empty without a record.
    """

    __test__ = False  # pytest takes classes named Test... for test cases

    passed: bool
    reason: str
    exit_code: int = 1
    timed_out: bool = False
    output: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    python: str = ""


@dataclass(frozen=True)
class TestRun:
    """One run of the test command, with its record if its test runner leaves one."""

    __test__ = False

    result: CommandResult
    evidence: Evidence | None

    @property
    def has_started(self) -> bool:
        """Whether the command found tests."""
        if self.evidence is None:
            return self.result.exit_code not in _NOT_EXECUTED
        return self.evidence.has_started

    @property
    def has_run(self) -> bool:
        """Whether a test ran."""
        return self.has_started and (self.evidence is None or self.evidence.has_run)

    @property
    def output(self) -> str:
        """The end of both streams."""
        return f"{self.result.stdout}{self.result.stderr}"[-MAX_OUTPUT_CHARS:]

    def verdict(
        self, task: CodingTask, changed: Sequence[str], left_out: Sequence[str] = ()
    ) -> TestVerdict:
        """Return the verdict of a run that started, or that the model's diff broke."""
        reason = decide_failure(
            self.result, self.evidence, changed=changed, required=task.required_tests
        )
        return TestVerdict(
            passed=not reason,
            reason=reason,
            exit_code=self.result.exit_code,
            timed_out=self.result.timed_out,
            output=self.output,
            counts=self.evidence.counts if self.evidence else {},
            left_out=list(left_out),
            python=self.evidence.python if self.evidence else "",
        )


async def judge(task: CodingTask, diff: bytes, settings: SandboxSettings) -> TestVerdict:
    """Run the tests on a clean copy plus a diff.

    Where no test runs, a control run on a clean copy says whether the diff is the cause: with the
    task's gold patch the tests must pass, and without one they must start. The control run is made
    once for each task in a process.

    Raises:
        TaskError: The control run fails.
        SandboxFailure: A sandbox would not start or died, or the task could not be set up.
    """
    try:
        run, changed, left_out = await run_on_clean_copy(task, diff, settings)
    except DiffRefused as refusal:
        return TestVerdict(False, str(refusal))
    if not run.has_run:
        await _CONTROLS.require_start(task, settings)
    return run.verdict(task, changed, left_out)


async def run_on_clean_copy(
    task: CodingTask, diff: bytes, settings: SandboxSettings
) -> tuple[TestRun, list[str], list[str]]:
    """Return a run of the tests, the diff's paths that counted, and those that were left out.

    Raises:
        DiffRefused: The diff does not apply.
        SandboxFailure: As `judge`.
    """
    async with await settings.open() as sandbox:
        base_tree = await prepare_task(task, sandbox, has_own_files=False)
        if base_tree is None:
            raise TaskError(NO_GIT)
        applied = await apply_diff(
            diff,
            sandbox,
            base_tree,
            allowed=task.allow_paths,
            task_paths=[*task.test_files, *task.restored_paths],
        )
        run = await run_tests(task, sandbox)
        return run, applied.changed, applied.left_out


async def judge_in_place(task: CodingTask, sandbox: Sandbox, base_tree: str | None) -> TestVerdict:
    """Run the tests where the model worked: in a directory that belongs to the user.

    Raises:
        TaskError: The tests do not start.
        SandboxFailure: The sandbox died, or the test files could not be written.
    """
    paths = task.restored_paths if base_tree is not None else ()
    # The restoration fails only if the model destroyed the repository.
    if paths and not await restore(paths, sandbox, str(base_tree)):
        return TestVerdict(False, "the tests could not be restored")
    run = await run_tests(task, sandbox)
    if not run.has_started:
        raise not_started(task, run, "in the working directory")
    return run.verdict(task, ())


async def run_tests(task: CodingTask, sandbox: Sandbox) -> TestRun:
    """Write the task's own test files, and run the tests.

    Raises:
        SandboxFailure: The sandbox died, or the test files could not be written.
    """
    await write_files(task.test_files, sandbox)
    command = task.test_command or "true"
    if runner_of(command, task.test_runner) is None:
        return TestRun(await sandbox.run(command, timeout_s=task.test_timeout_s), None)
    probe = Probe()
    await write_files(probe.files, sandbox)
    try:
        result = await sandbox.run(
            probe.instrument(command, sandbox.root), timeout_s=task.test_timeout_s
        )
        try:
            record = await sandbox.read_file(probe.record)
        except OSError:  # the tests removed the record
            record = b""
    finally:
        await sandbox.run(["rm", "-rf", "--", probe.folder])
    return TestRun(result, read_record(record, probe.key))


class _Controls:
    """The control runs of this process: whether each task's tests start without a model's diff."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, asyncio.Future[str]] = OrderedDict()

    async def require_start(self, task: CodingTask, settings: SandboxSettings) -> None:
        """Return if the tests start on a clean copy; with a gold patch, if they pass with it."""
        key = hashlib.sha256(repr((astuple(task), settings)).encode()).hexdigest()
        running = self._errors.get(key)
        if running is None or _is_unusable(running):
            running = asyncio.ensure_future(_control(task, settings))
            self._errors[key] = running
            while len(self._errors) > _MOST_CONTROLS:
                self._errors.popitem(last=False)
        # The run is shielded, because other rollouts may wait for it when this one is cancelled.
        if error := await asyncio.shield(running):
            raise TaskError(error)


def _is_unusable(run: asyncio.Future[str]) -> bool:
    """Say whether a control run has no result and will have none in this event loop."""
    if not run.done():
        return run.get_loop() is not asyncio.get_running_loop()
    return run.cancelled() or run.exception() is not None


_CONTROLS = _Controls()


async def _control(task: CodingTask, settings: SandboxSettings) -> str:
    """Return the reason why a task cannot be judged; empty if it can be."""
    gold = (task.gold_patch or "").encode()
    try:
        run, changed, _ = await run_on_clean_copy(task, gold, settings)
    except DiffRefused as refusal:
        return f"The task's gold patch cannot be used: {refusal}."
    if not run.has_started:
        return str(not_started(task, run, "on a clean copy of the task"))
    if gold and (reason := run.verdict(task, changed).reason):
        return (
            f"The task's tests fail with its gold patch: {reason}. Their output ends with: "
            f"{run.output.strip()[-500:]}"
        )
    return ""


def not_started(task: CodingTask, run: TestRun, where: str) -> TaskError:
    """Return the error of a task whose tests do not start."""
    ended = "ran out of time" if run.result.timed_out else f"ended with {run.result.exit_code}"
    return TaskError(
        f"The test command {task.test_command!r} did not start its tests {where}: it {ended}. "
        "Correct the command, or install its requirements in the image or with setup_command. "
        f"Its output ends with: {run.output.strip()[-500:] or '(none)'}"
    )
