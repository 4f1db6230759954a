"""The paths of a diff that do not count: tests, files of the test runner, modules that hide it.

Used by `coding_verdict` before the tests run. Pure. Must not: protect a path that the task allows.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

#: Files that configure a test runner or the interpreter, in any folder.
_CONFIGURATION = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini",
    "tox.toml", "setup.cfg", "pyproject.toml", ".coveragerc", "noxfile.py", "unittest.cfg",
    "nose.cfg", ".noserc", "nose2.cfg", "sitecustomize.py", "usercustomize.py", "*.pth",
    "*.egg-link", "pyvenv.cfg", "*.pyc", "package.json", ".mocharc*", "jest.config.*",
    "vitest.config.*", "Makefile", "GNUmakefile", "makefile",
)  # fmt: skip
#: Folders whose files do not count; `*.dist-info` can register plug-ins of pytest.
_FOLDERS = (
    "test", "tests", "__tests__", "__pycache__", "*.dist-info", "*.egg-info", ".git", ".rollout-*",
)  # fmt: skip
_TESTS = ("test_*.py", "*_test.py", "*.test.*", "*.spec.*", "*_test.go")
#: Top-level names, beside those of the standard library, that pytest and its plug-ins import.
_RUNNER_MODULES = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli",
     "pygments", "colorama", "attr", "attrs", "nose", "nose2", "xdist", "execnet", "hypothesis",
     "mock", "coverage", "typing_extensions"}
)  # fmt: skip
#: Endings of files that the interpreter imports.
_IMPORTED = (".py", ".so", ".pyd", ".zip")


def protected_paths(
    changed: Sequence[str],
    *,
    new: Collection[str],
    known: Collection[str],
    allowed: Sequence[str],
    task_paths: Sequence[str],
) -> list[str]:
    """Return the changed paths that do not count.

    Args:
        changed: Paths that a diff changes, below the root.
        new: Those of them that were not there before.
        known: Those of `folders_of(new)` that were there before.
        allowed: Globs of paths that the task lets the model change; `*` also matches `/`.
        task_paths: Paths of the task that `allowed` does not open: its test files and restored
            paths. A change of such a path, below it or above it does not count.
    """
    own = [PurePosixPath(path) for path in task_paths]
    packages = _packages(new, known)
    return [
        path
        for path in changed
        if _meets(PurePosixPath(path), own)
        or (
            not any(fnmatchcase(path, glob) for glob in allowed)
            and (_is_test_or_configuration(path) or (path in new and _shadows(path, packages)))
        )
    ]


def folders_of(new: Collection[str]) -> list[str]:
    """Return the folders above new paths, each also with the file that makes it a package."""
    folders = {str(folder) for path in new for folder in PurePosixPath(path).parents} - {"."}
    return sorted(folders | {f"{folder}/__init__.py" for folder in folders})


def _packages(new: Collection[str], known: Collection[str]) -> set[str]:
    """Return the folders that are packages; an old folder does not become one by a new file."""
    folders = {path for path in folders_of(new) if not path.endswith("/__init__.py")}
    return {
        folder
        for folder in folders
        if (mark := f"{folder}/__init__.py") in known or (folder not in known and mark in new)
    }


def _meets(path: PurePosixPath, own: Sequence[PurePosixPath]) -> bool:
    return any(path.is_relative_to(each) or each.is_relative_to(path) for each in own)


def _is_test_or_configuration(path: str) -> bool:
    *folders, name = PurePosixPath(path).parts
    return (
        any(fnmatchcase(name, glob) for glob in (*_CONFIGURATION, *_TESTS))
        # A link may take a folder's place, so the last name counts as a folder, too.
        or any(fnmatchcase(each, glob) for each in (*folders, name) for glob in _FOLDERS)
    )


def _shadows(path: str, packages: Collection[str]) -> bool:
    """Say whether a new path hides a module of the standard library or of the test runner.

    Only folders that are no packages can be in the interpreter's search path.
    """
    parts = PurePosixPath(path).parts
    for depth, part in enumerate(parts):
        if depth and "/".join(parts[:depth]) in packages:
            return False
        # A name without an ending at the end of a path may be a link to a folder.
        is_imported = path.endswith(_IMPORTED) or (depth == len(parts) - 1 and "." not in part)
        module = part.partition(".")[0]
        is_runner = module in _RUNNER_MODULES or module.startswith("pytest_")
        if is_imported and (is_runner or module in sys.stdlib_module_names):
            return True
    return False
