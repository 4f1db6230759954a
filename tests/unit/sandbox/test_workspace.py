from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.sandbox import workspace
from workers.sandbox.base import SandboxFailure
from workers.sandbox.sandbox_user import FolderOwnership
from workers.sandbox.workspace import Workspace, check_root, sweep_leftovers

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


# `check_root` alone is called here: a sandbox opened on one of these would be a disaster if the
# rule failed.
@pytest.mark.parametrize(
    "root",
    [
        "/", "/usr", "/usr/lib", "/etc", "/proc/self", "/dev", "/dev/shm", "/tmp", "/var", "/home",
        "~", "~/..",
    ],
)  # fmt: skip
def test_system_or_home_as_a_whole_is_refused(root: str) -> None:
    with pytest.raises(SandboxFailure, match="directory of its own"):
        check_root(Path(root).expanduser())


def test_link_to_a_refused_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(SandboxFailure, match="/etc cannot be"):
        check_root(tmp_path / "link")


def test_directory_inside_a_home_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    assert check_root(tmp_path / "project") == tmp_path / "project"


@as_root
def test_handing_over_changes_only_the_owners_entries_and_is_undone(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside.txt"
    (root / "sub").mkdir(parents=True)
    outside.write_text("outside")
    for name in ("plain", "sub/deep", "program", "others", "grouped"):
        (root / name).write_text(name)
    (root / "program").chmod(0o4755)
    os.chown(root / "others", 12345, 12345)
    os.chown(root / "grouped", 0, 54321)
    os.link(outside, root / "hard")
    (root / "soft").symlink_to(outside)

    ownership = FolderOwnership(root, 1_800_000_000)
    ownership.hand_over()
    owners = {path.name: path.lstat().st_uid for path in root.rglob("*")}
    assert owners == {
        "plain": 1_800_000_000,
        "sub": 1_800_000_000,
        "deep": 1_800_000_000,
        "grouped": 1_800_000_000,
        "soft": 1_800_000_000,
        "program": 0,
        "others": 12345,
        "hard": 0,
    }
    assert outside.stat().st_uid == 0
    assert (root / "program").stat().st_mode & 0o7777 == 0o4755

    (root / "new").write_text("new")
    os.chown(root / "new", 1_800_000_000, 1_800_000_000)
    ownership.take_back()
    assert {path.lstat().st_uid for path in root.rglob("*")} == {0, 12345}
    assert (root / "grouped").stat().st_gid == 54321
    assert (root / "new").stat().st_gid == root.stat().st_gid
    assert root.stat().st_uid == 0


@as_root
def test_workspace_that_fails_half_way_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    hand_over = FolderOwnership.hand_over

    def hand_over_and_fail(self: FolderOwnership) -> None:
        hand_over(self)
        raise OSError("disk error")

    monkeypatch.setattr(FolderOwnership, "hand_over", hand_over_and_fail)
    with pytest.raises(SandboxFailure, match="disk error"):
        Workspace(tmp_path, 1000)
    assert tmp_path.stat().st_uid == 0
    assert (tmp_path / "file").stat().st_uid == 0


def test_leftovers_of_a_killed_process_are_swept_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "temporary_place", lambda: str(tmp_path))
    (tmp_path / "work").mkdir()
    in_use = Workspace(tmp_path / "work", 1000)
    for name in ("rollout-sandbox-root-killed", "rollout-sandbox-base-young", "another-old"):
        (tmp_path / name).mkdir()
    for path in tmp_path.iterdir():
        if not path.name.endswith("young"):
            os.utime(path, (0, 0))
    sweep_leftovers.cache_clear()
    sweep_leftovers()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "work",
        in_use.base.name,
        "rollout-sandbox-base-young",
        "another-old",
    }
    in_use.close()
    assert not in_use.base.exists()
