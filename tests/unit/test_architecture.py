"""The layers, as one table that every import is held against.

A row says which modules make up a layer and which layers they may import. What is not listed is
not allowed; `lazily` may be imported inside functions only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "pipeline", "workers", "producers", "migrations")

MAX_LINES = 400
MAX_TEST_LINES = 600


@dataclass(frozen=True)
class Layer:
    modules: tuple[str, ...]
    may: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()


ADAPTERS = ("store", "queue")
SERVICES = ("dispatcher", "collector", "reconciler")

LAYERS = {
    # The pure middle.
    "contract": Layer(("pipeline.contract",)),
    "settings": Layer(("pipeline.settings",), ("contract",)),
    "retry": Layer(("pipeline.retry",), ("contract",)),
    "redaction": Layer(("pipeline.redaction",), ("contract", "settings")),
    "service loop": Layer(("pipeline.service",), ("contract",)),
    "hidden packages": Layer(("pipeline.hidden_packages",), ("contract",)),
    "package roots": Layer(("pipeline", "workers", "producers"), lazily=("library",)),
    # Adapters: each knows one outside system, and none knows another.
    "store": Layer(("pipeline.store",), ("contract", "settings", "retry")),
    "migrations": Layer(("migrations",), ("store",)),
    "queue": Layer(("pipeline.queue",), ("contract", "settings")),
    "limits": Layer(("pipeline.limits",), ("contract", "settings")),
    "embedded": Layer(("pipeline.embedded",), ("contract", "settings")),
    # Services: they use the adapters, and none knows another.
    **{
        name: Layer(
            (f"pipeline.{name}",), ("contract", "settings", "retry", "service loop", *ADAPTERS)
        )
        for name in SERVICES
    },
    "rescorer": Layer(("pipeline.rescorer",), ("contract", "settings", *ADAPTERS)),
    "redrive": Layer(("pipeline.redrive",), ("contract", *ADAPTERS)),
    "trainer": Layer(("pipeline.trainer",), ("contract", "settings", "embedded", *ADAPTERS)),
    "web": Layer(("pipeline.web",), ("contract", "settings", "limits", "trainer", *ADAPTERS)),
    # What puts them together.
    "controller": Layer(
        ("pipeline.controller",),
        ("contract", "settings", "redaction", "service loop", *ADAPTERS, *SERVICES),
    ),
    "cli": Layer(
        ("rollout",),
        (
            "contract",
            "settings",
            "hidden packages",
            "service loop",
            "embedded",
            "limits",
            "controller",
            "trainer",
            "web",
            "rescorer",
            "redrive",
            "producers",
            "workers",
            "library",
            "model clients",
            "rewards",
            *ADAPTERS,
        ),
    ),
    # Producers and workers: towards the middle, never towards each other.
    "producers": Layer(("producers",), ("contract", "settings", "store", "trainer")),
    "library": Layer(
        (
            "workers.core",
            "workers.agents",
            "workers.tools",
            "workers.sandbox",
            "workers.agentic_rollout",
            "workers.verl",
        ),
        lazily=("model clients", "rewards"),
    ),
    "model clients": Layer(("workers.llm", "workers.offline_policy"), ("contract", "library")),
    "rewards": Layer(("workers.rewards",), ("contract", "library")),
    "workers": Layer(
        ("workers",),
        (
            "contract",
            "settings",
            "redaction",
            "service loop",
            "queue",
            "limits",
            "library",
            "model clients",
            "rewards",
        ),
    ),
}

#: Other distributions that the pure middle may use.
CONTRACT_USES = {"pydantic"}
RECORD_USES = {"pydantic", "orjson", "zstandard"}

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


@dataclass(frozen=True)
class Import:
    """One import: who, whom, and whether it happens when the module is loaded."""

    source: str
    target: str
    lazy: bool
    for_types: bool
    line: int

    def __str__(self) -> str:
        how = " lazily" if self.lazy else ""
        return f"{self.source}:{self.line} imports {self.target}{how}"


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class ImportReader(ast.NodeVisitor):
    def __init__(self, source: str, known: set[str]) -> None:
        self.source, self.known = source, known
        self.found: list[Import] = []
        self._functions = self._type_blocks = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        for_types = getattr(node.test, "id", None) == "TYPE_CHECKING"
        self._type_blocks += for_types
        for child in node.body:
            self.visit(child)
        self._type_blocks -= for_types
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"{self.source}:{node.lineno} imports relatively"
        assert node.module is not None
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            self._note(submodule if submodule in self.known else node.module, node.lineno)

    def _note(self, target: str, line: int) -> None:
        self.found.append(
            Import(self.source, target, self._functions > 0, self._type_blocks > 0, line)
        )


@cache
def all_imports() -> tuple[Import, ...]:
    known = {module_of(path) for path in source_files()}

    def read() -> Iterator[Import]:
        for path in source_files():
            reader = ImportReader(module_of(path), known)
            reader.visit(syntax_of(path))
            yield from reader.found

    return tuple(read())


def layer_of(module: str) -> str | None:
    """Return the layer whose module path is the longest beginning of this one."""
    best, name = "", None
    for layer, row in LAYERS.items():
        for own in row.modules:
            exact_only = layer == "package roots"
            inside = module == own or (not exact_only and module.startswith(f"{own}."))
            if inside and len(own) >= len(best):
                best, name = own, layer
    return name


def own_imports() -> list[Import]:
    return [item for item in all_imports() if item.target.partition(".")[0] in PACKAGES]


def test_every_module_has_a_layer():
    homeless = [module_of(path) for path in source_files() if layer_of(module_of(path)) is None]
    assert not homeless, "give it a row in LAYERS"


def test_the_table_names_only_layers_that_it_has():
    named = {name for row in LAYERS.values() for name in (*row.may, *row.lazily)}
    assert named <= set(LAYERS)


def test_every_import_is_in_the_table():
    refused = []
    for item in own_imports():
        source, target = layer_of(item.source), layer_of(item.target)
        assert source is not None
        row = LAYERS[source]
        allowed = target in (source, *row.may) or (
            target in row.lazily and (item.lazy or item.for_types)
        )
        if not allowed:
            refused.append(f"{item} ({source} → {target})")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    ("layer", "never"),
    [
        ("workers", "store"),
        ("library", "contract"),
        ("store", "queue"),
        ("queue", "store"),
        ("limits", "store"),
        ("producers", "workers"),
        ("workers", "producers"),
        *((one, other) for one in SERVICES for other in SERVICES if one != other),
    ],
)
def test_the_table_itself_keeps_apart_what_must_not_meet(layer, never):
    assert never not in (*LAYERS[layer].may, *LAYERS[layer].lazily)


def test_the_product_imports_no_benchmarks():
    assert not [str(item) for item in all_imports() if item.target.startswith("benchmarks")]


def test_no_module_imports_itself_through_others():
    graph: dict[str, set[str]] = {}
    for item in own_imports():
        if not item.lazy and not item.for_types:
            graph.setdefault(item.source, set()).add(item.target)
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in finished:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            finished.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_the_contract_uses_the_standard_library_and_pydantic_only():
    foreign = []
    for item in all_imports():
        if layer_of(item.source) != "contract":
            continue
        allowed = RECORD_USES if item.source == "pipeline.contract.trajectory" else CONTRACT_USES
        top = item.target.partition(".")[0]
        if top not in (allowed | sys.stdlib_module_names | {"pipeline"}):
            foreign.append(str(item))
    assert not foreign


def test_no_module_reads_the_environment_while_it_is_imported():
    readers = []
    for path in source_files():
        for statement in syntax_of(path).body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            text = ast.unparse(statement)
            if "os.environ" in text or "getenv(" in text:
                readers.append(f"{module_of(path)}:{statement.lineno}")
    assert not readers


def test_files_are_short_enough_to_read():
    limits = [(path, MAX_LINES) for path in source_files()]
    limits += [(path, MAX_LINES) for path in (ROOT / "benchmarks").rglob("*.py")]
    limits += [(path, MAX_TEST_LINES) for path in (ROOT / "tests").rglob("*.py")]
    lengths = [(path, len(path.read_text().splitlines()), most) for path, most in limits]
    too_long = [f"{path.relative_to(ROOT)}: {n} > {most}" for path, n, most in lengths if n > most]
    assert not too_long


def test_files_are_nouns_of_the_subject():
    names = [path for path in source_files() if FORBIDDEN_NAMES & set(path.stem.split("_"))]
    assert not names


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("workers.core.trajectory", ("openai", "celery", "sqlalchemy", "boto3")),
        ("workers.agents.react_agent", ("openai", "celery", "sqlalchemy", "boto3")),
        ("pipeline.contract.messages", ("celery", "sqlalchemy", "openai")),
        ("pipeline.settings", ("celery", "sqlalchemy", "openai", "boto3")),
        ("workers.process.worker", ("sqlalchemy", "psycopg", "openai")),
        ("pipeline.controller", ("openai", "anthropic")),
    ],
)
def test_an_import_loads_nothing_that_it_does_not_need(module, never):
    code = f"import sys, {module}; print(*(name for name in {never!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split()
