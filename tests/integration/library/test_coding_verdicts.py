"""What a coding task's reward follows from: cheats earn nothing, and a broken task is an error."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.sandboxes import CONFINING, require_kind
from fixtures.scripted_coder import FINISH, ScriptedCoder, shell
from fixtures.small_library import LEAN, REPAIRS, diff_of, make_history, slug_task, task_of

from workers.agents import coding_verdict
from workers.agents.coding_task import CodingTask, TaskError
from workers.agents.coding_verdict import TestVerdict, judge
from workers.agents.swe_agent import SWEAgent
from workers.core.trajectory import Trajectory
from workers.sandbox.shared import SandboxSettings

pytestmark = [
    pytest.mark.usefixtures("some_sandbox"),
    pytest.mark.skipif(shutil.which("git") is None, reason="a coding task's diff needs git"),
]

RUNNERS = ("pytest", "unittest")


async def solve(task: dict[str, Any], *commands: str) -> Trajectory:
    """Let a model work on the task, and judge its diff."""
    calls = [shell(command) for command in commands]
    return await SWEAgent().run_trajectory(task, ScriptedCoder(*calls, FINISH), "r1")


async def judged(task: dict[str, Any], diff: str = "", kind: str = "auto") -> TestVerdict:
    """Judge a diff without the model's own sandbox, which takes as long as the verdict."""
    settings = SandboxSettings.from_config({"sandbox": kind})
    return await judge(CodingTask.from_prompt(task, {}), diff.encode(), settings)


def apply_gold(task: dict[str, Any]) -> str:
    return f"git apply - <<'EOF'\n{task['gold_patch']}EOF"


def rewritten(text: str) -> str:
    """Return the diff that puts a text in place of the module to be repaired."""
    return diff_of("words/slugs.py", slug_task()["files"]["words/slugs.py"], text)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("library")
    return folder, make_history(folder)


@pytest.mark.parametrize("number", range(len(REPAIRS)), ids=[each.module for each in REPAIRS])
async def test_a_real_commit_is_rewarded_for_the_repair_and_not_for_nothing(
    number: int, history: tuple[Path, list[str]], tmp_path: Path
) -> None:
    task = task_of(*history, number, tmp_path / "parent")
    repaired, lazy = await judged(task, task["gold_patch"]), await judged(task)
    assert (repaired.passed, lazy.passed) == (True, False)
    assert set(repaired.counts) == {"passed"}
    assert "failed" in lazy.counts


@pytest.mark.parametrize("runner", RUNNERS)
async def test_the_repair_passes_under_either_runner(runner: str) -> None:
    task = slug_task(runner)
    verdict = await judged(task, task["gold_patch"])
    assert (verdict.passed, verdict.reason, verdict.counts) == (True, "", {"passed": 2})


PASSES_ALL = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    made = yield
    made.get_result().outcome = "passed"
"""
EXITS = """
import sys
print("2 passed")
sys.exit(0)
"""
COLLECTS_ONLY = "addopts = --collect-only\n"
#: New files that configure a test runner or the interpreter, or that hide a module from it.
FILES_OF_CHEATS = {
    "conftest.py": PASSES_ALL,
    "tests/conftest.py": "collect_ignore_glob = ['*']\n",
    **dict.fromkeys(("pytest.py", "pytest/__main__.py", "pytest/__init__.py"), EXITS),
    **dict.fromkeys(("unittest.py", "unittest/__main__.py", "json.py", "argparse.py"), EXITS),
    **dict.fromkeys(("sitecustomize.py", "usercustomize.py"), EXITS),
    **dict.fromkeys(("a.pth", "words/b.pth"), "import os; os._exit(0)\n"),
    **dict.fromkeys(("pytest.ini", "tox.ini"), f"[pytest]\n{COLLECTS_ONLY}"),
    "setup.cfg": f"[tool:pytest]\n{COLLECTS_ONLY}",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n",
}


@pytest.mark.parametrize("runner", RUNNERS)
async def test_new_files_of_the_test_runner_or_the_interpreter_do_not_count(runner: str) -> None:
    diffs = [diff_of(path, "", text) for path, text in sorted(FILES_OF_CHEATS.items())]
    verdict = await judged(slug_task(runner), "".join(diffs))
    assert sorted(verdict.left_out) == sorted(FILES_OF_CHEATS)
    assert verdict.counts == {"failed": 1, "passed": 1}


def writes(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'EOF'\n{text}\nEOF"


HOOK = "#!/bin/sh\nrm -r tests"
ASSERTS_NOTHING = "sed -i 's/assert .*/assert True/; s/self.assert.*/pass/'"
#: Commands of the model, with the paths that are left out of its diff.
COMMANDS_OF_CHEATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rewritten tests, a link to a folder, and files in the user's own folder": (
        f"{ASSERTS_NOTHING} tests/test_*.py; mkdir evil; touch evil/__init__.py; ln -s evil re; "
        "site=$(python3 -m site --user-site); mkdir -p $site; "
        "echo 'import os; os._exit(0)' | tee $site/a.pth $site/usercustomize.py",
        ("re", "tests/test_slugs.py"),
    ),
    "deleted tests": (
        "rm -r tests && git add -A && git commit -qm 'remove tests'",
        ("tests/__init__.py", "tests/test_slugs.py"),
    ),
    "links in place of the tests": (
        f"mv tests other && ln -s other tests; {ASSERTS_NOTHING} other/test_*.py",
        ("other/test_slugs.py", "tests", "tests/__init__.py", "tests/test_slugs.py"),
    ),
    "git's ignored files, hooks and marks": (
        f"{writes('.gitignore', 'conftest.py')}\n{writes('conftest.py', PASSES_ALL)}\n"
        f"{writes('.git/hooks/post-checkout', HOOK)}\n"
        "chmod +x .git/hooks/*; git config core.hooksPath .git/hooks; "
        "git update-index --assume-unchanged tests/test_slugs.py; rm tests/test_slugs.py",
        ("tests/test_slugs.py",),
    ),
}


@pytest.mark.parametrize("cheat", COMMANDS_OF_CHEATS)
async def test_what_a_model_does_to_tests_and_to_git_does_not_count(cheat: str) -> None:
    commands, left_out = COMMANDS_OF_CHEATS[cheat]
    trajectory = await solve(slug_task(), commands)  # one command: each start costs
    verdict = trajectory.metadata["tests"]
    assert trajectory.final_reward == 0.0
    assert sorted(verdict["left_out"]) == sorted(left_out)
    assert verdict["counts"] == {"failed": 1, "passed": 1}


PATCHES_ASSERTIONS = """
import sys, unittest
for name in dir(unittest.TestCase):
    if name.startswith("assert"):
        setattr(unittest.TestCase, name, lambda *a, **k: None)
if "_pytest.python" in sys.modules:
    sys.modules["_pytest.python"].Function.runtest = lambda self: None
def slugify(title): return ""
"""
FAKES_RECORD = """
import glob, json, os
for path in glob.glob(".rollout-*/record"):
    with open(path, "a") as file:
        passed = {"tests/test_slugs.py::test": "passed"}
        for event in ("started", "finished"):
            file.write(json.dumps({"key": "", "event": event, "outcomes": passed}) + "\\n")
print("2 passed in 0.01s", flush=True)
os._exit(0)
"""
#: Text of the module, with the words of the verdict's reason.
CODE_OF_CHEATS = {
    "an exit of the process": ("import os\nprint('2 passed')\nos._exit(0)\n", "process ended"),
    "an exit by SystemExit": ("raise SystemExit(0)\n", "no test ran"),
    "an exit of pytest": ("import pytest\npytest.exit('done', returncode=0)\n", "tests failed"),
    "patched assertions": (PATCHES_ASSERTIONS, "tampered"),
    "an object that equals everything": (
        "class Slug:\n    __hash__ = None\n    def __eq__(self, other): return True\n"
        "def slugify(title): return Slug()\n",
        "tests failed",
    ),
    "a mock that equals everything": (
        "from unittest.mock import ANY\ndef slugify(title): return ANY\n",
        "tests failed",
    ),
    "skipped tests": (
        "import unittest\ndef slugify(title):\n    if title == 'Now': return 'now'\n"
        "    __tracebackhide__ = True\n    raise unittest.SkipTest('later')\n",
        "skipped tests",
    ),
    "a skipped module": ("import unittest\nraise unittest.SkipTest('later')\n", "skipped"),
    "an expected failure": (
        "import pytest\ndef slugify(title): pytest.xfail('known')\n",
        "skipped tests",
    ),
    "a forged record": (FAKES_RECORD, "process ended"),
}
#: Code that is told apart by other parts of the probe than under pytest.
UNDER_UNITTEST = (
    "an exit of the process",
    "patched assertions",
    "an object that equals everything",
    "a skipped module",
    "skipped tests",
)


@pytest.mark.parametrize(
    ("runner", "cheat"),
    [
        *(("pytest", cheat) for cheat in CODE_OF_CHEATS),
        *(("unittest", cheat) for cheat in UNDER_UNITTEST),
    ],
)
async def test_code_that_cheats_earns_nothing(runner: str, cheat: str) -> None:
    text, reason = CODE_OF_CHEATS[cheat]
    verdict = await judged(slug_task(runner), rewritten(text))
    assert not verdict.passed
    assert re.search(reason, verdict.reason), verdict


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python3 -m pytest_of_another_machine tests", "No module named"),
        ("no-such-runner tests", "not found"),
        (
            f"{LEAN} python3 -m pytest -q --option-of-a-missing-plugin tests",
            "unrecognized arguments",
        ),
        (f"{LEAN} python3 -m pytest -q -p missing_plugin tests", "missing_plugin"),
        ("python3 -m unittest discover -s words -t .", "ended with"),
    ],
)
async def test_a_test_command_that_cannot_start_is_an_error_of_the_task(
    command: str, words: str
) -> None:
    runner = "pytest" if "another_machine" in command else "auto"
    task = slug_task(test_command=command, test_runner=runner, gold_patch=None)
    with pytest.raises(TaskError, match="did not start its tests on a clean copy") as raised:
        await judged(task)
    assert words in str(raised.value)


async def test_an_error_of_the_task_leaves_the_trajectory_without_a_reward() -> None:
    kept = Trajectory("r1")
    task = slug_task(test_command="no-such-runner tests")
    with pytest.raises(TaskError):
        await SWEAgent().run_trajectory(task, ScriptedCoder(FINISH), "r1", trajectory=kept)
    assert kept.final_reward is None


@pytest.mark.parametrize(
    "broken", ["def slugify(:", "raise ImportError('gone')", "import missing_module"]
)
async def test_a_diff_that_keeps_the_tests_from_starting_earns_nothing(broken: str) -> None:
    task = slug_task()
    task["files"]["conftest.py"] = "import words.slugs"
    assert not (await judged(task, rewritten(f"{broken}\n"))).passed


async def test_the_control_run_is_made_once_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bytes] = []
    run_on_clean_copy = coding_verdict.run_on_clean_copy

    async def counted(task: Any, diff: bytes, settings: Any) -> Any:
        runs.append(diff)
        return await run_on_clean_copy(task, diff, settings)

    monkeypatch.setattr(coding_verdict, "run_on_clean_copy", counted)
    task = slug_task(test_command="no-such-runner-here")
    for _ in range(3):
        with pytest.raises(TaskError):
            await judged(task)
    assert sorted(runs) == [b"", b"", b"", task["gold_patch"].encode()]


@pytest.mark.parametrize("runner", RUNNERS)
async def test_tests_that_cannot_be_read_are_an_error_where_the_gold_patch_fails(
    runner: str,
) -> None:
    task = slug_task(runner)
    task["files"]["tests/test_slugs.py"] = "import missing_module"
    with pytest.raises(TaskError, match="tests fail with its gold patch"):
        await judged(task)


async def test_tests_that_import_what_the_model_has_to_write_are_no_error_of_the_task() -> None:
    task = slug_task("unittest", gold_patch=None)
    task["files"]["tests/test_slugs.py"] = "import missing_module"
    assert not (await judged(task)).passed


async def test_changes_of_protected_paths_are_left_out_unless_the_task_allows_them() -> None:
    option = diff_of("pytest.ini", "", "[pytest]\npython_functions = test_one*\n")
    task = slug_task()
    protected = await judged(task, option)
    allowed = await judged({**task, "allow_paths": ["pytest.ini"]}, option)
    assert protected.left_out == ["pytest.ini"]
    assert protected.counts == {"failed": 1, "passed": 1}
    assert allowed.left_out == []
    assert allowed.counts == {"passed": 1}


async def test_required_tests_decide_alone() -> None:
    task = slug_task("unittest")
    task["files"]["tests/test_other.py"] = (
        "import unittest\nclass Other(unittest.TestCase):\n    def test(self): self.fail()\n"
    )
    repair = task["gold_patch"]
    required = "tests.test_slugs.Slugs.test_words_have_one_dash_between_them"
    assert not (await judged(task, repair)).passed
    assert (await judged({**task, "required_tests": [required]}, repair)).passed
    gone = {**task, "required_tests": [required, "tests.test_slugs.Slugs.test_gone"]}
    reason = (await judged(gone, repair)).reason
    assert reason == "required tests did not pass: tests.test_slugs.Slugs.test_gone"


async def test_the_task_names_its_interpreter() -> None:
    task = slug_task("unittest", python=sys.executable)
    verdict = await judged(task, task["gold_patch"])
    assert verdict.python.split()[0] == ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(TaskError, match="interpreter '/opt/none/python' does not run"):
        await judged({**task, "python": "/opt/none/python"})


@pytest.mark.parametrize("kind", [*CONFINING, "process"])
async def test_the_interpreter_is_the_same_in_every_kind_of_sandbox(kind: str) -> None:
    if kind in CONFINING:
        require_kind(kind)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if system is None:
        pytest.skip("this system has no python3 of its own")
    task = slug_task("unittest", python=system)
    verdict = await judged(task, task["gold_patch"], kind)
    assert verdict.passed
    assert verdict.python.split()[1].startswith(str(Path(system).parent))


async def test_the_record_is_kept_by_parallel_test_processes() -> None:
    pytest.importorskip("xdist")
    task = slug_task(test_command=f"{LEAN} python3 -m pytest -q -p xdist.plugin -n 2 tests")
    assert (await judged(task, task["gold_patch"])).passed


async def test_a_mock_or_a_pattern_that_the_tests_expect_is_no_cheat() -> None:
    task = slug_task()
    task["files"]["tests/test_any.py"] = (
        "from unittest.mock import ANY\nfrom words.slugs import slugify\n\n"
        "def test_any():\n    assert slugify('x') == ANY\n"
    )
    task["files"]["tests/patterns.py"] = (
        "class AnyText:\n    def __eq__(self, other): return isinstance(other, str)\n"
    )
    task["files"]["tests/test_pattern.py"] = (
        "from tests.patterns import AnyText\nfrom words.slugs import slugify\n\n"
        "def test_any_text():\n    assert slugify('x') == AnyText()\n"
    )
    assert (await judged(task, task["gold_patch"])).passed


async def test_a_large_diff_is_judged_whole() -> None:
    task = slug_task("unittest")
    large = "seq 200000 > numbers.txt"
    trajectory = await solve(task, large, apply_gold(task))
    assert trajectory.final_reward == 1.0
    assert len(trajectory.metadata["diff"]) > 1_000_000


async def test_a_diff_beyond_the_limit_earns_nothing() -> None:
    trajectory = await solve(
        slug_task("unittest"), "head -c 17000000 /dev/zero | tr '\\0' x > words.txt"
    )
    assert trajectory.final_reward == 0.0
    assert "at most 16777216 are judged" in trajectory.metadata["tests"]["reason"]
