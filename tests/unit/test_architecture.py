"""The layers, as one table that every import is held against.

A row says which modules make up a layer and which layers they may import: at the top of a module,
inside a function or for types alone makes no difference. Rows stand from the bottom to the top, and
a row names only rows above it in the file, so no arrow leads upward.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = ("rollout", "pipeline", "workers", "producers", "migrations", "benchmarks")

MAX_LINES = 400
MAX_TEST_LINES = 600


@dataclass(frozen=True)
class Layer:
    modules: tuple[str, ...]
    may: tuple[str, ...] = ()


PURE = ("contract", "settings")
ADAPTERS = ("store", "queue")
SERVICES = ("dispatcher", "collector", "reconciler")
LIBRARY = ("library", "token rows", "model clients", "rewards", "agentic rollout")

LAYERS = {
    # The pure middle.
    "contract": Layer(("pipeline.contract",)),
    "settings": Layer(("pipeline.settings",), ("contract",)),
    "retry": Layer(("pipeline.retry",), ("contract",)),
    "redaction": Layer(("pipeline.redaction",), PURE),
    "service loop": Layer(("pipeline.service",), ("contract",)),
    "hidden packages": Layer(("pipeline.hidden_packages",), ("contract",)),
    # Arrays of recorded tokens: no database and no torch, so that every side may use them.
    "tokens": Layer(("pipeline.tokens",), ("contract",)),
    # Adapters: each knows one outside system, and none knows another.
    "store": Layer(("pipeline.store",), (*PURE, "retry")),
    "migrations": Layer(("migrations",), ("store",)),
    "queue": Layer(("pipeline.queue",), PURE),
    "limits": Layer(("pipeline.limits",), PURE),
    "embedded": Layer(("pipeline.embedded",), PURE),
    "departures": Layer(("pipeline.departures",), ("store",)),
    "requests": Layer(("pipeline.requests",), (*PURE, *ADAPTERS)),
    "rescorer": Layer(("pipeline.rescorer",), (*PURE, "requests", *ADAPTERS)),
    "announcer": Layer(("pipeline.policy_announcer",), (*PURE, *ADAPTERS)),
    "attachments": Layer(("pipeline.attachments",), (*PURE, *ADAPTERS)),
    # Services: they use the adapters, and none knows another.
    **{
        name: Layer(
            (f"pipeline.{name}",),
            (
                *PURE,
                "retry",
                "service loop",
                "departures",
                "requests",
                "rescorer",
                "announcer",
                "attachments",
                *ADAPTERS,
            ),
        )
        for name in SERVICES
    },
    # Calls of remote agents, from workers and services; then the services themselves.
    "remote calls": Layer(
        (
            "pipeline.agentcore.call_pace",
            "pipeline.agentcore.data_plane",
            "pipeline.agentcore.results_store",
        ),
        (*PURE, "limits"),
    ),
    "remote results": Layer(
        ("pipeline.agentcore",),
        (*PURE, "redaction", "service loop", "tokens", "limits", "remote calls", *ADAPTERS),
    ),
    "controller": Layer(
        ("pipeline.controller",),
        (*PURE, "redaction", "service loop", "remote results", *ADAPTERS, *SERVICES),
    ),
    "redrive": Layer(("pipeline.redrive",), ("contract", *ADAPTERS)),
    "trainer": Layer(("pipeline.trainer",), (*PURE, "embedded", "tokens", *ADAPTERS)),
    # Producers and workers: towards the middle, never towards each other.
    "producers": Layer(("producers",), (*PURE, "store")),
    "library": Layer(
        (
            "workers.core",
            "workers.agents",
            "workers.tools",
            "workers.sandbox",
        ),
    ),
    # Rows of the library's trajectories: made of tokens as the trainer client's are.
    "token rows": Layer(("workers.verl",), ("library", "tokens")),
    "model clients": Layer(
        ("workers.llm", "workers.offline_policy"), ("contract", "library", "tokens")
    ),
    "rewards": Layer(("workers.rewards",), ("contract", "library")),
    "agentic rollout": Layer(
        ("workers.agentic_rollout",), ("library", "token rows", "model clients")
    ),
    # Runs in an agent's container, without Celery or a database driver.
    "agent apps": Layer(("workers.agentcore",), ("contract", "redaction")),
    "gateway": Layer(("workers.gateway",), ("contract", "library", "model clients")),
    "worker process": Layer(
        ("workers.process",),
        (
            *PURE,
            "redaction",
            "service loop",
            "tokens",
            "queue",
            "limits",
            "gateway",
            "remote calls",
            *LIBRARY,
        ),
    ),
    # What puts them together.
    "package roots": Layer(("pipeline", "workers", "producers"), LIBRARY),
    "command line": Layer(
        ("rollout",),
        (
            *PURE,
            "redaction",
            "hidden packages",
            "tokens",
            "service loop",
            "embedded",
            "limits",
            "controller",
            "remote calls",
            "agent apps",
            "rescorer",
            "announcer",
            "redrive",
            "trainer",
            "producers",
            "worker process",
            *LIBRARY,
            *ADAPTERS,
        ),
    ),
}
# Only in a checkout: it may import everything, and nothing may import it.
LAYERS["benchmarks"] = Layer(("benchmarks",), tuple(LAYERS))

#: Other distributions that the pure middle may use.
CONTRACT_USES = {"pydantic"}
RECORD_USES = {"pydantic", "orjson", "zstandard"}
RECORDS = ("pipeline.contract.trajectory", "pipeline.contract.journal")

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


@dataclass(frozen=True)
class Import:
    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path, known: set[str]) -> Iterator[Import]:
    source = module_of(path)
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                target = submodule if submodule in known else node.module
                yield Import(source, target, node.lineno)


@cache
def all_imports() -> tuple[Import, ...]:
    known = {module_of(path) for path in source_files()}
    return tuple(item for path in source_files() for item in imports_of(path, known))


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


def test_no_arrow_of_the_table_leads_upward():
    below: set[str] = set()
    for name, row in LAYERS.items():
        assert set(row.may) <= below, name
        below.add(name)


def test_every_import_is_in_the_table():
    refused = []
    for item in own_imports():
        source, target = layer_of(item.source), layer_of(item.target)
        assert source is not None
        if target not in (source, *LAYERS[source].may):
            refused.append(f"{item} ({source} → {target})")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    ("layer", "never"),
    [
        ("worker process", "store"),
        ("library", "contract"),
        ("store", "queue"),
        ("queue", "store"),
        ("limits", "store"),
        ("producers", "worker process"),
        ("worker process", "producers"),
        *((one, other) for one in SERVICES for other in SERVICES if one != other),
    ],
)
def test_the_table_itself_keeps_apart_what_must_not_meet(layer, never):
    assert never not in LAYERS[layer].may


def test_no_module_imports_itself_through_others():
    graph: dict[str, set[str]] = {}
    for item in own_imports():
        if item.target != item.source:
            graph.setdefault(item.source, set()).add(item.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_contract_uses_the_standard_library_and_pydantic_only():
    foreign = []
    for item in all_imports():
        if layer_of(item.source) != "contract":
            continue
        allowed = RECORD_USES if item.source in RECORDS else CONTRACT_USES
        top = item.target.partition(".")[0]
        if top not in (allowed | sys.stdlib_module_names | {"pipeline"}):
            foreign.append(str(item))
    assert not foreign


def test_each_file_of_the_reading_order_calls_those_beside_it():
    rows = [line for line in ARCHITECTURE.read_text().splitlines() if re.match(r"\| \d \|", line)]
    files = [re.findall(r"\(\.\./([\w/]+)\.py\)", row) for row in rows]
    calls = [(row[0], called) for row in files for called in row[1:]]
    calls += [(files[n - 1][0], files[m - 1][0]) for n, m in ((3, 4), (3, 5), (6, 7), (7, 8))]
    imported = {(item.source, item.target) for item in all_imports()}
    arrows = {tuple(path.replace("/", ".") for path in call) for call in calls}
    assert len(rows) == 9
    assert not arrows - imported


def test_only_the_store_speaks_sql():
    speakers = [
        module_of(path)
        for path in source_files()
        if layer_of(module_of(path)) not in ("store", "migrations", "benchmarks")
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "sqlalchemy"
        if {"text", "select", "insert", "update", "delete"} & {alias.name for alias in node.names}
    ]
    assert not speakers


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
        ("workers.process.worker", ("sqlalchemy", "psycopg", "openai", "numpy")),
        ("pipeline.controller", ("openai", "anthropic")),
        ("pipeline.store.schema", ("alembic", "mako", "pygments")),
        ("pipeline.trainer.adapters.segment_table", ("pyarrow", "datasets")),
    ],
)
def test_an_import_loads_nothing_that_it_does_not_need(module, never):
    code = f"import sys, {module}; print(*(name for name in {never!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split()
