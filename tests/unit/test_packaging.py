"""What the wheel holds beside the modules: data files, and the migrations as data of the store."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGE_DATA = PYPROJECT["tool"]["setuptools"]["package-data"]


def packed(package: str) -> set[Path]:
    folder = ROOT / package
    return {path for pattern in PACKAGE_DATA[package] for path in folder.glob(pattern)}


def test_every_data_file_of_a_package_is_in_the_wheel() -> None:
    for package in PACKAGE_DATA:
        files = [path for path in (ROOT / package).rglob("*") if path.is_file()]
        data = {path for path in files if path.suffix not in (".py", ".pyc")}
        assert data - packed(package) == set()


def test_the_migrations_are_data_of_the_store_and_no_package_of_their_own() -> None:
    folder = ROOT / "migrations"
    files = {path for path in folder.rglob("*") if path.suffix in (".py", ".mako")}
    link = ROOT / "pipeline/store/migrations"
    assert {link / path.relative_to(folder) for path in files} <= packed("pipeline")
    assert not list(folder.rglob("__init__.py"))
