"""Which changed paths of a diff count: a solution's do, those that can decide the tests do not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from workers.agents.protected_paths import protected_paths

#: What the repository has: a package, and a folder of scripts that is none.
KNOWN = {"words", "words/__init__.py", "scripts"}


def left_out(
    *changed: str,
    new: Collection[str] = (),
    allowed: Sequence[str] = (),
    task_paths: Sequence[str] = (),
) -> list[str]:
    return protected_paths(changed, new=new, known=KNOWN, allowed=allowed, task_paths=task_paths)


@pytest.mark.parametrize(
    "path",
    ["words/json.py", "words/new/re.py", "words/slugs.py", "json.md", "docs/pytest.rst",
     "testing.py", "latest/x.py", "setup.py", "words/pytester.py", "contest.py"],
)  # fmt: skip
def test_files_of_a_solution_count(path: str) -> None:
    assert left_out(path, "words/new/__init__.py", new={path, "words/new/__init__.py"}) == []


@pytest.mark.parametrize(
    "path",
    ["json.py", "scripts/json.py", "pytest.py", "pytest/__main__.py", "pytest_cov.py", "re",
     "_pytest.so", "unittest.zip"],
)  # fmt: skip
def test_a_new_file_that_hides_a_module_does_not_count_but_an_old_one_does(path: str) -> None:
    assert left_out(path, new={path}) == [path]
    assert left_out(path) == []


def test_an_old_folder_does_not_become_a_package_by_a_new_file() -> None:
    paths = ("scripts/__init__.py", "scripts/json.py")
    assert left_out(*paths, new=set(paths)) == ["scripts/json.py"]


@pytest.mark.parametrize(
    "path",
    ["conftest.py", "words/conftest.py", "a/b.pth", "tests", "words/tests/data.json",
     "test_slugs.py", "words/slugs_test.py", "x.spec.ts", "evil.dist-info/entry_points.txt"],
)  # fmt: skip
def test_tests_and_configuration_do_not_count_unless_they_are_allowed(path: str) -> None:
    assert left_out(path) == [path]
    assert left_out(path, allowed=["*"]) == []
    assert left_out(path, allowed=["other/*"]) == [path]


@pytest.mark.parametrize("path", ["checks/a.py", "checks", "checks/a.py/b"])
def test_paths_of_the_task_do_not_count_whatever_is_allowed(path: str) -> None:
    assert left_out(path, allowed=["*"], task_paths=["checks/a.py"]) == [path]
