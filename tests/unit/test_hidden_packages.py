"""A user's file with the name of one of our packages: which it hides, and what is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.hidden_packages import PACKAGES, explain_hidden, find_hidden


def test_nothing_is_hidden_where_nothing_has_our_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert find_hidden() == find_hidden(tmp_path) == {}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_module_or_package_beside_a_script_hides_ours(tmp_path: Path, name: str) -> None:
    module = tmp_path / f"{name}.py"
    module.touch()
    assert find_hidden(tmp_path) == {name: module}
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").touch()
    assert find_hidden(tmp_path) == {name: package}


def test_a_failed_import_names_the_file_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ModuleNotFoundError("No module named 'workers.core'", name="workers.core")
    assert explain_hidden(error) is None
    (tmp_path / "workers.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    explained = explain_hidden(error)
    assert explained is not None
    assert explained.code == "E143"
    assert str(tmp_path / "workers.py") in explained.what
    assert explain_hidden(ImportError("x", name="numpy")) is None
