"""What the wheel holds: the product's packages, data files, the migrations as data of the store."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PACKAGE_DATA = SETUPTOOLS["package-data"]


def packed(package: str) -> set[Path]:
    folder = ROOT / package
    return {path for pattern in PACKAGE_DATA[package] for path in folder.glob(pattern)}


def test_the_wheel_holds_the_product_and_no_benchmarks() -> None:
    patterns = SETUPTOOLS["packages"]["find"]["include"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    packed = {name for name in packages if any(fnmatch(name, pattern) for pattern in patterns)}
    assert packages - packed == {"benchmarks"}


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
