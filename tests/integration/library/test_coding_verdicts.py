"""What a coding task's reward follows from: cheats earn nothing, and a broken task is an error."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.sandboxes import CONFINING, require_kind
from fixtures.scripted_coder import FINISH, ScriptedCoder, shell
from fixtures.small_library import REPAIRS, make_history, slug_task, task_of

from workers.agents import coding_verdict
from workers.agents.coding_task import TaskError
from workers.agents.swe_agent import SWEAgent
from workers.core.trajectory import Trajectory

pytestmark = [
    pytest.mark.usefixtures("some_sandbox"),
    pytest.mark.skipif(shutil.which("git") is None, reason="a coding task's diff needs git"),
]

RUNNERS = ("pytest", "unittest")


async def solve(task: dict[str, Any], *commands: str) -> Trajectory:
    calls = [shell(command) for command in commands]
    return await SWEAgent().run_trajectory(task, ScriptedCoder(*calls, FINISH), "r1")


def apply_gold(task: dict[str, Any]) -> str:
    return f"git apply - <<'EOF'\n{task['gold_patch']}EOF"


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("library")
    return folder, make_history(folder)


@pytest.mark.parametrize("number", range(len(REPAIRS)), ids=[each.module for each in REPAIRS])
async def test_a_real_commit_is_rewarded_for_the_repair_and_not_for_nothing(
    number: int, history: tuple[Path, list[str]], tmp_path: Path
) -> None:
    task = task_of(*history, number, tmp_path / "parent")
    repaired = await solve(task, apply_gold(task))
    lazy = await solve(task, "ls")
    assert (repaired.final_reward, lazy.final_reward) == (1.0, 0.0)
    assert set(repaired.metadata["tests"]["counts"]) == {"passed"}
    assert "failed" in lazy.metadata["tests"]["counts"]


@pytest.mark.parametrize("runner", RUNNERS)
async def test_the_repair_passes_under_either_runner(runner: str) -> None:
    task = slug_task(runner)
    verdict = (await solve(task, apply_gold(task))).metadata["tests"]
    assert (verdict["passed"], verdict["reason"], verdict["counts"]) == (True, "", {"passed": 2})


PASSES_ALL = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    made = yield
    made.get_result().outcome = "passed"
"""
SHADOW = """
import sys
print("2 passed")
sys.exit(0)
"""
EQUALS_ALL = """
class Slug:
    def __eq__(self, other): return True
    __hash__ = None

def slugify(title): return Slug()
"""
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


def writes(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'EOF'\n{text}\nEOF"


#: The ways, each with its commands.
CHEATS: dict[str, list[str]] = {
    "a conftest.py that reports every test as passed": [writes("conftest.py", PASSES_ALL)],
    "a conftest.py beside the tests": [writes("tests/conftest.py", "collect_ignore_glob = ['*']")],
    "a pytest.py and a unittest.py in place of the runner": [
        writes("pytest.py", SHADOW),
        writes("unittest.py", SHADOW),
        writes("unittest/__main__.py", SHADOW),
        "mkdir pytest; printf 'print(1)' > pytest/__main__.py; touch pytest/__init__.py",
    ],
    "a module of the standard library in the tree": [
        writes("json.py", SHADOW),
        writes("argparse.py", SHADOW),
        "mkdir evil && ln -s evil re && touch evil/__init__.py",
    ],
    "rewritten tests": ["sed -i 's/assert .*/assert True/; s/self.assert.*/pass/' tests/test_*.py"],
    "deleted tests": ["rm -r tests && git add -A && git commit -qm 'remove tests'"],
    "a sitecustomize.py and path files": [
        writes("sitecustomize.py", SHADOW),
        writes("usercustomize.py", SHADOW),
        "echo 'import os; os._exit(0)' | tee a.pth words/b.pth",
        "site=$(python3 -m site --user-site); mkdir -p $site; "
        "echo 'import os; os._exit(0)' | tee $site/a.pth $site/usercustomize.py",
    ],
    "an exit at the import of the solution": [
        writes("words/slugs.py", "import os\nprint('2 passed')\nos._exit(0)")
    ],
    "an exit of the interpreter by SystemExit": [writes("words/slugs.py", "raise SystemExit(0)")],
    "an exit of pytest": [
        writes("words/slugs.py", "import pytest\npytest.exit('done', returncode=0)")
    ],
    "patched assertions": [writes("words/slugs.py", PATCHES_ASSERTIONS)],
    "an object that equals everything": [writes("words/slugs.py", EQUALS_ALL)],
    "a mock that equals everything": [
        writes("words/slugs.py", "from unittest.mock import ANY\ndef slugify(title): return ANY")
    ],
    "options of the runner": [
        writes("pytest.ini", "[pytest]\naddopts = --collect-only"),
        writes("tox.ini", "[pytest]\naddopts = --collect-only"),
        writes("setup.cfg", "[tool:pytest]\naddopts = --collect-only"),
        writes("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--collect-only'"),
    ],
    "skipped tests": [
        writes(
            "words/slugs.py",
            "import unittest\ndef slugify(title):\n"
            "    if title == 'Now': return 'now'\n"
            "    __tracebackhide__ = True\n    raise unittest.SkipTest('later')",
        )
    ],
    "a skipped module": [
        writes("words/slugs.py", "import unittest\nraise unittest.SkipTest('later')")
    ],
    "an expected failure": [
        writes("words/slugs.py", "import pytest\ndef slugify(title): pytest.xfail('known')")
    ],
    "links in place of the tests": [
        "mv tests other && ln -s other tests",
        "sed -i 's/assert .*/assert True/; s/self.assert.*/pass/' other/test_*.py",
    ],
    "git's ignored files, hooks and marks": [
        writes(".gitignore", "conftest.py\nwords/slugs.py"),
        writes("conftest.py", PASSES_ALL),
        writes(".git/hooks/post-checkout", "#!/bin/sh\nrm -r tests"),
        "chmod +x .git/hooks/*; git config core.hooksPath .git/hooks; "
        "git update-index --assume-unchanged tests/test_slugs.py; rm tests/test_slugs.py",
    ],
    "a forged record": [writes("words/slugs.py", FAKES_RECORD)],
}


#: Ways of which unittest is told apart by other code than pytest.
UNDER_UNITTEST = (
    "a pytest.py and a unittest.py in place of the runner",
    "an exit at the import of the solution",
    "patched assertions",
    "an object that equals everything",
    "a skipped module",
    "skipped tests",
)


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheats_earn_nothing_under_pytest(cheat: str) -> None:
    await expect_nothing(slug_task("pytest"), cheat)


@pytest.mark.parametrize("cheat", UNDER_UNITTEST)
async def test_cheats_earn_nothing_under_unittest(cheat: str) -> None:
    await expect_nothing(slug_task("unittest"), cheat)


async def expect_nothing(task: dict[str, Any], cheat: str) -> None:
    trajectory = await solve(task, "\n".join(CHEATS[cheat]))  # one command: each start costs
    verdict = trajectory.metadata["tests"]
    assert trajectory.final_reward == 0.0, verdict
    assert verdict["reason"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python3 -m pytest_of_another_machine tests", "No module named"),
        ("no-such-runner tests", "not found"),
        ("python3 -m pytest -q --option-of-a-missing-plugin tests", "unrecognized arguments"),
        ("python3 -m pytest -q -p missing_plugin tests", "missing_plugin"),
        ("python3 -m unittest discover -s words -t .", "ended with"),
    ],
)
async def test_a_test_command_that_cannot_start_is_an_error_of_the_task(
    command: str, words: str
) -> None:
    runner = "pytest" if "another_machine" in command else "auto"
    task = slug_task(test_command=command, test_runner=runner, gold_patch=None)
    kept = Trajectory("r1")
    with pytest.raises(TaskError, match="did not start its tests on a clean copy") as raised:
        await SWEAgent().run_trajectory(task, ScriptedCoder(FINISH), "r1", trajectory=kept)
    assert words in str(raised.value)
    assert kept.final_reward is None


@pytest.mark.parametrize(
    "broken", ["def slugify(:", "raise ImportError('gone')", "import missing_module"]
)
async def test_a_diff_that_keeps_the_tests_from_starting_earns_nothing(broken: str) -> None:
    task = slug_task()
    task["files"]["conftest.py"] = "import words.slugs"
    assert (await solve(task, writes("words/slugs.py", broken))).final_reward == 0.0


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
            await solve(task)
    assert sorted(runs) == [b"", b"", b"", task["gold_patch"].encode()]


@pytest.mark.parametrize("runner", RUNNERS)
async def test_tests_that_cannot_be_read_are_an_error_where_the_gold_patch_fails(
    runner: str,
) -> None:
    task = slug_task(runner)
    task["files"]["tests/test_slugs.py"] = "import missing_module"
    with pytest.raises(TaskError, match="tests fail with its gold patch"):
        await solve(task)
    # A task may ask for the missing module, so without a gold patch the model is at fault.
    assert (await solve({**task, "gold_patch": None})).final_reward == 0.0


async def test_changes_of_protected_paths_are_left_out_unless_the_task_allows_them() -> None:
    option = writes("pytest.ini", "[pytest]\npython_functions = test_one*")
    task = slug_task()
    protected = await solve(task, option)
    allowed = await solve({**task, "allow_paths": ["pytest.ini"]}, option)
    assert protected.metadata["tests"]["left_out"] == ["pytest.ini"]
    assert protected.metadata["tests"]["counts"] == {"failed": 1, "passed": 1}
    assert allowed.metadata["tests"]["left_out"] == []
    assert allowed.metadata["tests"]["counts"] == {"passed": 1}


async def test_required_tests_decide_alone() -> None:
    task = slug_task()
    task["files"]["tests/test_other.py"] = "def test_other():\n    assert False\n"
    repair = apply_gold(task)
    required = "tests/test_slugs.py::test_words_have_one_dash_between_them"
    assert (await solve(task, repair)).final_reward == 0.0
    assert (await solve({**task, "required_tests": [required]}, repair)).final_reward == 1.0
    gone = {**task, "required_tests": [required, "tests/test_slugs.py::test_gone"]}
    verdict = (await solve(gone, repair)).metadata["tests"]
    assert verdict["reason"] == "required tests did not pass: tests/test_slugs.py::test_gone"


async def test_the_task_names_its_interpreter() -> None:
    task = slug_task("unittest", python=sys.executable)
    verdict = (await solve(task, apply_gold(task))).metadata["tests"]
    assert verdict["python"].split()[0] == ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(TaskError, match="interpreter '/opt/none/python' does not run"):
        await solve({**task, "python": "/opt/none/python"})


@pytest.mark.parametrize("kind", [*CONFINING, "process"])
async def test_the_interpreter_is_the_same_in_every_kind_of_sandbox(kind: str) -> None:
    if kind in CONFINING:
        require_kind(kind)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if system is None:
        pytest.skip("this system has no python3 of its own")
    task = slug_task("unittest", python=system)
    coder = ScriptedCoder(shell(apply_gold(task)), FINISH)
    trajectory = await SWEAgent(sandbox=kind).run_trajectory(task, coder, "r1")
    assert trajectory.final_reward == 1.0
    assert trajectory.metadata["tests"]["python"].split()[1].startswith(str(Path(system).parent))


async def test_the_record_is_kept_by_parallel_test_processes() -> None:
    pytest.importorskip("xdist")
    task = slug_task(test_command="python3 -m pytest -q -n 2 tests")
    assert (await solve(task, apply_gold(task))).final_reward == 1.0


async def test_a_mock_that_the_tests_expect_is_no_cheat() -> None:
    task = slug_task()
    task["files"]["tests/test_any.py"] = (
        "from unittest.mock import ANY\nfrom words.slugs import slugify\n\n"
        "def test_any():\n    assert slugify('x') == ANY\n"
    )
    assert (await solve(task, apply_gold(task))).final_reward == 1.0


async def test_a_large_diff_is_judged_whole() -> None:
    task = slug_task()
    large = "seq 200000 > numbers.txt"
    trajectory = await solve(task, large, apply_gold(task))
    assert trajectory.final_reward == 1.0
    assert len(trajectory.metadata["diff"]) > 1_000_000
