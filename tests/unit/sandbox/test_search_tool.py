from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from workers.core.tool_schemas import ToolResult
from workers.core.tools_config import create_tools
from workers.tools.search_tool import SearchTool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "src" / "pkg").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "src" / "a.py").write_text("import os\n\ndef find(x):\n    return x\n")
    (folder / "src" / "pkg" / "b.txt").write_text("Find the finder\n")
    (folder / ".git" / "c.py").write_text("find\n")
    (folder / "binary").write_bytes(b"find\0")
    (tmp_path / "secret.txt").write_text("find")
    return folder


async def search(root: Path, pattern: str, *, timeout: float = 10, **given: Any) -> ToolResult:
    tool = SearchTool({"root": str(root), "timeout": timeout})
    return await tool.execute_tool("t", {"pattern": pattern, **given})


async def test_text_search_names_file_line_and_text(root: Path) -> None:
    result = await search(root, "find")
    assert result.to_text() == "src/a.py:3: def find(x):\nsrc/pkg/b.txt:1: Find the finder"
    assert result.metrics == {"matches": 2, "complete": True}


async def test_case_words_and_extensions_narrow_the_search(root: Path) -> None:
    assert (await search(root, "Find", case_sensitive=True)).metrics["matches"] == 1
    assert "finder" in (await search(root, "finder", whole_words=True)).to_text()
    assert (await search(root, "finde", whole_words=True)).metrics["matches"] == 0
    assert (await search(root, "find", file_extensions=["py"])).metrics["matches"] == 1


async def test_pattern_is_plain_text_unless_regex_is_asked_for(root: Path) -> None:
    assert (await search(root, "find(x)")).metrics["matches"] == 1
    assert (await search(root, r"^def \w+\(", regex=True)).metrics["matches"] == 1
    assert (await search(root, r"^def \w+\(")).metrics["matches"] == 0


async def test_context_lines_surround_the_match(root: Path) -> None:
    result = await search(root, "def", context_lines=1)
    assert (
        result.to_text() == "src/a.py:2- \nsrc/a.py:3: def find(x):\nsrc/a.py:4-     return x\n--"
    )


async def test_path_may_be_one_file_or_a_directory_below(root: Path) -> None:
    assert (
        await search(root, "find", path="src/pkg")
    ).to_text() == "src/pkg/b.txt:1: Find the finder"
    assert (await search(root, "find", path="src/a.py")).to_text() == "src/a.py:3: def find(x):"


async def test_files_and_directories_are_found_by_name(root: Path) -> None:
    assert (await search(root, "*.py", command="search_files")).to_text() == "src/a.py"
    assert (await search(root, "b", command="search_files")).to_text() == "binary\nsrc/pkg/b.txt"
    assert (await search(root, "src/p*", command="search_files")).to_text() == "src/pkg/b.txt"
    assert (await search(root, "pk", command="search_dir")).to_text() == "src/pkg/"
    assert (await search(root, r"^a\.", command="search_files", regex=True)).to_text() == "src/a.py"


async def test_most_results_are_returned_with_a_notice(root: Path) -> None:
    (root / "many.txt").write_text("hit\n" * 1000)
    result = await search(root, "hit", max_results=3)
    assert result.to_text().splitlines()[-1] == "[stopped at max_results=3]"
    assert result.metrics == {"matches": 3, "complete": False}


async def test_nothing_found_is_a_success_that_says_so(root: Path) -> None:
    result = await search(root, "nowhere")
    assert result.success
    assert result.to_text() == "nothing found"


@pytest.mark.parametrize("path", ["..", "../secret.txt", "/etc", "link", "nothing"])
async def test_nothing_outside_the_root_is_searched(root: Path, path: str) -> None:
    (root / "link").symlink_to("..")
    assert not (await search(root, "find", path=path)).success


async def test_links_and_pipes_in_the_tree_are_passed_over(root: Path) -> None:
    (root / "link.txt").symlink_to("../secret.txt")
    (root / "folder").symlink_to("..")
    os.mkfifo(root / "pipe.txt")
    assert (await search(root, "find")).metrics["matches"] == 2


@pytest.mark.parametrize("pattern", ["(", "[", "*", "", "x" * 2000, "(" * 900 + ")" * 900])
async def test_bad_regular_expression_is_told(root: Path, pattern: str) -> None:
    result = await search(root, pattern, regex=True)
    assert not result.success
    assert "pattern" in (result.error or "") or "regular expression" in (result.error or "")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a|aa)+$", "a" * 80 + "b"),
        ("(a|a)*b", "a" * 40),
        ("((a{1,1000}){1,1000}){1,1000}b", "a" * 5000),
        ("^(?:.?){3000}a{3000}", "a" * 3000),
        (r"(\w+\s?)*\1!", "aaaa " * 50),
    ],
)
@pytest.mark.parametrize("command", ["search_text", "search_files"])
async def test_catastrophic_pattern_stops_at_its_time_and_blocks_nobody(
    root: Path, pattern: str, text: str, command: str
) -> None:
    (root / "evil.txt").write_text(text)
    (root / text[:200].strip()).write_text("")
    begun = time.monotonic()
    turns, running = 0, True

    def watch() -> None:
        nonlocal turns
        while running:
            time.sleep(0.01)
            turns += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = await search(root, pattern, regex=True, command=command, timeout=0.5)
    running = False
    watcher.join()
    assert result.success
    took = time.monotonic() - begun
    assert took < 20
    assert turns > 5 or took < 0.4, "the engine held the interpreter's lock"


async def test_without_other_tools_it_searches_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    made = (SearchTool({"max_results": 5}), create_tools({"search": {"max_results": 5}})["search"])
    for tool in made:
        result = await tool.execute_tool("t", {"pattern": "def"})
        assert result.result == {
            "pattern": "def",
            "matches": [{"path": "src/a.py", "line": 3, "text": "def find(x):"}],
            "complete": True,
        }


async def test_it_searches_where_the_other_tools_work(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for config in (
        {"file_editor": {"root": str(root)}, "search": {"max_results": 5}},
        {"search": None, "bash_executor": {}, "file_editor": {"root": str(root)}},
        {"file_editor": {"root": "/"}, "search": {"root": str(root)}},
    ):
        tools = create_tools(config)
        found = await tools["search"].execute_tool("t", {"pattern": "def"})
        assert [match["path"] for match in found.result["matches"]] == ["src/a.py"]


@pytest.mark.parametrize("in_sandbox", [True, False])
async def test_an_empty_directory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_sandbox: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"search": {"sandbox": "process"}} if in_sandbox else ["search"]
    tool = create_tools(config)["search"]
    result = await tool.execute_tool("t", {"pattern": "x"})
    await tool.release_instance("t")
    assert result.success
    assert result.to_text() == "nothing found: the directory that is searched has no files"
    assert result.result["matches"] == []
