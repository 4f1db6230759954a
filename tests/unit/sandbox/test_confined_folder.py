from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sandbox.confined_folder import ConfinedFolder, OutsideRoot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "inner"
    (folder / "sub").mkdir(parents=True)
    (folder / "inside.txt").write_text("inside")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    return folder


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "sub/../../secret.txt",
        "/etc/passwd",
        "/",
        "..",
        "sub/../../inner/../secret.txt",
    ],
)
def test_path_outside_the_root_is_refused(root: Path, path: str) -> None:
    with pytest.raises(OutsideRoot):
        ConfinedFolder(root).read(path)
    with pytest.raises(OutsideRoot):
        ConfinedFolder(root).write(path, b"x", make_folders=True)


@pytest.mark.parametrize("target", ["../secret.txt", "../elsewhere/../secret.txt", "{abs}"])
def test_link_out_of_the_root_is_refused(root: Path, target: str) -> None:
    secret = root.parent / "secret.txt"
    (root / "link").symlink_to(target.format(abs=secret))
    with pytest.raises(OutsideRoot):
        ConfinedFolder(root).read("link")
    with pytest.raises(OutsideRoot):
        ConfinedFolder(root).write("link", b"x")
    assert secret.read_text() == "secret"


def test_link_to_a_folder_outside_is_refused(root: Path) -> None:
    (root / "out").symlink_to(root.parent / "elsewhere")
    with pytest.raises(OutsideRoot):
        ConfinedFolder(root).write("out/new.txt", b"x", make_folders=True)
    assert not list((root.parent / "elsewhere").iterdir())


def test_links_within_the_root_are_followed(root: Path) -> None:
    (root / "sub" / "relative").symlink_to("../inside.txt")
    (root / "absolute").symlink_to(root / "inside.txt")
    (root / "folder").symlink_to("sub")
    files = ConfinedFolder(root)
    assert files.read("sub/relative") == b"inside"
    assert files.read("folder/relative") == b"inside"
    assert files.read("absolute") == b"inside"
    files.write("folder/relative", b"changed")
    assert (root / "inside.txt").read_text() == "changed"
    assert (root / "sub" / "relative").is_symlink()


def test_links_in_a_circle_end_with_an_error(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many symbolic links"):
        ConfinedFolder(root).read("a")


def test_absolute_path_within_the_root_is_the_file(root: Path) -> None:
    assert ConfinedFolder(root).read(str(root / "inside.txt")) == b"inside"


def test_pipe_and_folder_are_not_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        ConfinedFolder(root).read("pipe")
    with pytest.raises(IsADirectoryError):
        ConfinedFolder(root).read("sub")
    with pytest.raises(OSError, match="Not a regular file"):
        ConfinedFolder(root).write("sub", b"x")


def test_too_large_a_file_is_neither_read_nor_written(root: Path) -> None:
    files = ConfinedFolder(root, file_bytes=4)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read("inside.txt")
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.write("new.txt", b"12345")
    assert not (root / "new.txt").exists()


def test_writing_keeps_the_mode_and_leaves_no_temporary_file(root: Path) -> None:
    (root / "inside.txt").chmod(0o755)
    ConfinedFolder(root).write("inside.txt", b"new")
    assert (root / "inside.txt").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in root.iterdir()) == ["inside.txt", "sub"]


def test_folder_swapped_for_a_link_meanwhile_never_leads_outside(root: Path) -> None:
    """A rival swaps `sub` between a folder and a link to the outside while we write through it."""
    outside = root.parent / "elsewhere"
    files = ConfinedFolder(root)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (root / "sub").rename(root / "kept")
            (root / "sub").symlink_to(outside)
            (root / "sub").unlink()
            (root / "kept").rename(root / "sub")
            time.sleep(0)

    rival = threading.Thread(target=swap)
    rival.start()
    outcomes: set[str] = set()
    try:
        deadline = time.monotonic() + 20
        while not ("written" in outcomes and len(outcomes) > 2) and time.monotonic() < deadline:
            try:
                files.write("sub/file.txt", b"ours")
                outcomes.add("written")
            except OSError as error:
                outcomes.add(type(error).__name__)
    finally:
        stop.set()
        rival.join()
    assert not list(outside.iterdir())
    assert "written" in outcomes
    assert len(outcomes) > 1, "the rival never got in between"


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "root" / "a" / "b").mkdir(parents=True)
        (base / "root" / "a" / "up").symlink_to("../..")
        (base / "root" / "a" / "here").symlink_to(".")
        (base / "root" / "abs").symlink_to("/")
        (base / "root" / "file").write_text("ours")
        (base / "file").write_text("secret")
        yield base


@given(
    names=st.lists(
        st.sampled_from(["..", ".", "a", "b", "up", "here", "abs", "file", "/", "", "root"]),
        max_size=8,
    ),
    absolute=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_path_reads_anything_but_the_roots_files(
    tree: Path, names: list[str], absolute: bool
) -> None:
    path = ("/" if absolute else "") + "/".join(names)
    try:
        content = ConfinedFolder(tree / "root").read(path)
    except OSError:
        return
    assert content == b"ours"


@given(path=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_text_as_a_path_ends_in_a_file_or_an_os_error(tree: Path, path: str) -> None:
    try:
        assert ConfinedFolder(tree / "root").read(path) == b"ours"
    except OSError:
        pass
