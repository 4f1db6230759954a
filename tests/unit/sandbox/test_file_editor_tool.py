from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from workers.core.tool_schemas import ToolResult
from workers.tools.file_editor_tool import FileEditorTool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "src" / "deep" / "deeper").mkdir(parents=True)
    (folder / "src" / "a.py").write_text("one\ntwo\nthree\n")
    (folder / ".hidden").write_text("x")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


class Editor:
    def __init__(self, root: Path, **config: Any) -> None:
        self.tool = FileEditorTool({"root": str(root), **config})

    async def __call__(self, command: str, path: str, **given: Any) -> ToolResult:
        return await self.tool.execute_tool("t", {"command": command, "path": path, **given})


@pytest.fixture
def editor(root: Path) -> Editor:
    return Editor(root)


async def test_view_numbers_the_lines(editor: Editor) -> None:
    result = await editor("view", "src/a.py")
    assert result.success
    assert result.to_text() == "     1\tone\n     2\ttwo\n     3\tthree"


@pytest.mark.parametrize(
    ("view_range", "shown"),
    [([2, 3], ["two", "three"]), ([2, -1], ["two", "three"]), ([1, 1], ["one"])],
)
async def test_view_range_selects_lines(
    editor: Editor, view_range: list[int], shown: list[str]
) -> None:
    result = await editor("view", "src/a.py", view_range=view_range)
    assert [line.split("\t")[1] for line in result.to_text().splitlines()] == shown


async def test_lines_are_those_of_other_programs(editor: Editor, root: Path) -> None:
    (root / "feed.py").write_bytes("a = 1\n\x0c\nb = 2\r\nc = '\u2028\x1d'\nd = 4\n".encode())
    assert len((root / "feed.py").read_bytes().split(b"\n")) - 1 == 5
    seen = await editor("view", "feed.py", view_range=[3, 5])
    assert seen.to_text() == "     3\tb = 2\n     4\tc = '\u2028\x1d'\n     5\td = 4"
    edited = await editor("str_replace", "feed.py", old_str="d = 4", new_str="d = 5")
    assert edited.to_text().endswith("     5\td = 5")
    await editor("insert", "feed.py", insert_line=4, new_str="new = 0")
    assert (root / "feed.py").read_bytes().split(b"\n")[4].startswith(b"new = 0")


@pytest.mark.parametrize("view_range", [[0, 2], [3, 2], [9, 10], [1], [1, 2, 3]])
async def test_impossible_view_range_is_told(editor: Editor, view_range: list[int]) -> None:
    result = await editor("view", "src/a.py", view_range=view_range)
    assert not result.success
    assert "view_range" in (result.error or "")


async def test_view_of_a_directory_lists_two_levels_without_hidden_ones(editor: Editor) -> None:
    assert (await editor("view", ".")).to_text() == "src/\nsrc/a.py\nsrc/deep/"


async def test_long_file_is_cut_with_a_notice(root: Path) -> None:
    (root / "long.txt").write_text("x" * 5000)
    result = await Editor(root, max_chars=100)("view", "long.txt")
    assert len(result.to_text()) < 200
    assert "use view_range" in result.to_text()


async def test_create_makes_directories_and_undo_removes_the_file(
    editor: Editor, root: Path
) -> None:
    assert (await editor("create", "new/dir/b.txt", file_text="hello")).success
    assert (root / "new/dir/b.txt").read_text() == "hello"
    assert (await editor("undo_edit", "new/dir/b.txt")).success
    assert not (root / "new/dir/b.txt").exists()


async def test_str_replace_changes_the_one_place_and_shows_it(editor: Editor, root: Path) -> None:
    result = await editor("str_replace", "src/a.py", old_str="two\n", new_str="2\n")
    assert (root / "src/a.py").read_text() == "one\n2\nthree\n"
    assert "     2\t2" in result.to_text()


async def test_str_replace_without_new_str_deletes(editor: Editor, root: Path) -> None:
    await editor("str_replace", "src/a.py", old_str="two\n")
    assert (root / "src/a.py").read_text() == "one\nthree\n"


async def test_text_that_occurs_twice_is_refused_with_its_lines(editor: Editor, root: Path) -> None:
    (root / "src/a.py").write_text("x = 1\ny = 2\nx = 1\n")
    result = await editor("str_replace", "src/a.py", old_str="x = 1", new_str="x = 3")
    assert not result.success
    assert "lines 1, 3" in (result.error or "")
    assert (root / "src/a.py").read_text() == "x = 1\ny = 2\nx = 1\n"


async def test_overlapping_occurrences_count_as_two(editor: Editor, root: Path) -> None:
    (root / "src/a.py").write_text("aaa")
    assert not (await editor("str_replace", "src/a.py", old_str="aa", new_str="b")).success


async def test_text_that_is_not_there_names_the_line_that_differs_by_space(
    editor: Editor, root: Path
) -> None:
    (root / "src/a.py").write_text("def f():\n\treturn 1\n")
    result = await editor("str_replace", "src/a.py", old_str="    return 1", new_str="return 2")
    assert "line 2" in (result.error or "")
    assert "'\\treturn 1'" in (result.error or "")


async def test_windows_line_ends_are_matched_and_kept(editor: Editor, root: Path) -> None:
    (root / "w.txt").write_bytes(b"a\r\nb\r\nc\r\n")
    assert (await editor("str_replace", "w.txt", old_str="a\nb", new_str="x\ny")).success
    assert (await editor("insert", "w.txt", insert_line=1, new_str="new")).success
    assert (root / "w.txt").read_bytes() == b"x\r\nnew\r\ny\r\nc\r\n"


async def test_bytes_that_are_no_utf8_survive_an_edit_beside_them(
    editor: Editor, root: Path
) -> None:
    (root / "l.txt").write_bytes(b"caf\xe9\nrest\n")
    assert (await editor("str_replace", "l.txt", old_str="rest", new_str="REST")).success
    assert (root / "l.txt").read_bytes() == b"caf\xe9\nREST\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [(0, "new\none\ntwo\nthree\n"), (1, "one\nnew\ntwo\nthree\n"), (3, "one\ntwo\nthree\nnew\n")],
)
async def test_insert_puts_whole_lines_after_the_line(
    editor: Editor, root: Path, line: int, expected: str
) -> None:
    assert (await editor("insert", "src/a.py", insert_line=line, new_str="new")).success
    assert (root / "src/a.py").read_text() == expected


async def test_insert_after_a_last_line_without_an_end_begins_a_new_line(
    editor: Editor, root: Path
) -> None:
    (root / "n.txt").write_text("only")
    assert (await editor("insert", "n.txt", insert_line=1, new_str="new")).success
    assert (root / "n.txt").read_text() == "only\nnew"


async def test_edits_are_undone_last_first_and_not_further(editor: Editor, root: Path) -> None:
    await editor("str_replace", "src/a.py", old_str="one", new_str="1")
    await editor("str_replace", "src/a.py", old_str="two", new_str="2")
    assert (await editor("undo_edit", "src/a.py")).success
    assert (root / "src/a.py").read_text() == "1\ntwo\nthree\n"
    assert (await editor("undo_edit", "src/a.py")).success
    assert (root / "src/a.py").read_text() == "one\ntwo\nthree\n"
    assert "no edit" in ((await editor("undo_edit", "src/a.py")).error or "")


async def test_edits_of_one_trajectory_are_not_undone_by_another(
    editor: Editor, root: Path
) -> None:
    await editor("str_replace", "src/a.py", old_str="one", new_str="1")
    other = await editor.tool.execute_tool("u", {"command": "undo_edit", "path": "src/a.py"})
    assert not other.success


async def test_concurrent_edits_of_a_file_all_arrive(editor: Editor, root: Path) -> None:
    (root / "c.txt").write_text("".join(f"<{n}>\n" for n in range(20)))
    results = await asyncio.gather(
        *(editor("str_replace", "c.txt", old_str=f"<{n}>", new_str=f"[{n}]") for n in range(20))
    )
    assert all(result.success for result in results)
    assert (root / "c.txt").read_text() == "".join(f"[{n}]\n" for n in range(20))


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "src/../../secret.txt", "link"])
@pytest.mark.parametrize("command", ["view", "create", "str_replace", "insert"])
async def test_nothing_outside_the_root_is_shown_or_changed(
    editor: Editor, root: Path, path: str, command: str
) -> None:
    (root / "link").symlink_to("../secret.txt")
    given = {"file_text": "x", "old_str": "secret", "new_str": "x", "insert_line": 0}
    result = await editor(command, path, **given)
    assert not result.success
    assert "outside" in (result.error or "")
    assert (root.parent / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"command": "create", "path": "x"}, "file_text"),
        ({"command": "str_replace", "path": "src/a.py"}, "old_str"),
        ({"command": "insert", "path": "src/a.py", "new_str": "x"}, "insert_line"),
        ({"command": "insert", "path": "src/a.py", "new_str": "x", "insert_line": 9}, "0 to 3"),
        ({"command": "str_replace", "path": "src/a.py", "old_str": ""}, "empty"),
        ({"command": "str_replace", "path": "none", "old_str": "x"}, "no such file"),
        ({"command": "view", "path": "none"}, "No such file"),
        ({"command": "delete", "path": "x"}, "must be one of"),
        ({"path": "x"}, "missing required parameter"),
        ({"command": "view", "path": "nul\0"}, "NUL"),
    ],
)
async def test_bad_call_is_told_and_changes_nothing(
    editor: Editor, root: Path, given: dict[str, Any], said: str
) -> None:
    result = await editor.tool.execute_tool("t", given)
    assert not result.success
    assert said in (result.error or "")
    assert (root / "src/a.py").read_text() == "one\ntwo\nthree\n"


async def test_binary_file_is_not_edited(editor: Editor, root: Path) -> None:
    (root / "b").write_bytes(b"\x7fELF\0\0")
    assert "binary" in ((await editor("view", "b")).error or "")
