"""The disk quota of the local sandboxes: what passes it, what does not, and what it costs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fixtures.sandboxes import LIMITS

from workers.sandbox.base import DISK_FULL_EXIT_CODE, CommandResult, Sandbox, SandboxLimits
from workers.sandbox.disk_quota import DiskQuota
from workers.sandbox.kinds import SandboxKind, open_sandbox

MB = 1024**2
QUOTA = SandboxLimits(
    wall_s=20, cpu_s=10, file_bytes=16 * MB, disk_bytes=32 * MB, memory_bytes=LIMITS.memory_bytes
)


@pytest.fixture
async def sandbox(kind: SandboxKind) -> AsyncIterator[Sandbox]:
    async with await open_sandbox(kind, limits=QUOTA) as opened:
        yield opened


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that only the sandbox uses: other programs' files hide what a command writes."""

    def free_bytes(quota: DiskQuota) -> int:
        files = (
            os.path.join(folder, name)
            for root in quota._folders
            for folder, _, names in os.walk(root)
            for name in names
        )
        return 1024**4 - sum(os.lstat(file).st_blocks * 512 for file in files)

    monkeypatch.setattr(DiskQuota, "_free_bytes", free_bytes)


def write(megabytes: int, name: str = "$i", folder: str = ".") -> str:
    return f"head -c {megabytes}M /dev/zero > {folder}/{name}"


def is_refused(result: CommandResult) -> bool:
    return (
        result.exit_code == DISK_FULL_EXIT_CODE
        and "disk quota of 32 MB is used up" in result.stderr
        and not result.timed_out
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("folder", [".", "$TMPDIR"], ids=["root", "temporary folder"])
async def test_six_files_below_the_file_limit_use_up_the_quota(
    sandbox: Sandbox, folder: str
) -> None:
    result = await sandbox.run(f"for i in 1 2 3 4 5 6; do {write(10, folder=folder)}; done")
    assert is_refused(result), result


async def test_a_command_that_goes_on_is_ended(sandbox: Sandbox) -> None:
    result = await sandbox.run(f"for i in 1 2 3 4 5; do {write(10)}; done; sleep 15; echo through")
    assert is_refused(result), result
    assert "through" not in result.stdout
    assert result.duration_s < 10


async def test_deleted_files_that_are_open_count(sandbox: Sandbox) -> None:
    script = "\n".join(
        f"exec {fd}> f{fd}; rm f{fd}; head -c 12M /dev/zero >&{fd}" for fd in (3, 4, 5, 6)
    )
    assert is_refused(await sandbox.run(f"{script}\nsleep 15"))
    assert (await sandbox.run("true")).succeeded


@pytest.mark.usefixtures("alone")
async def test_space_comes_back_when_files_are_deleted(sandbox: Sandbox) -> None:
    assert (await sandbox.run(f"for i in 1 2; do {write(10)}; done")).succeeded
    assert is_refused(await sandbox.run(f"for i in 3 4 5; do {write(10)}; done"))
    assert is_refused(await sandbox.run(write(10, "6")))
    assert (await sandbox.run("rm 3 4")).succeeded
    assert (await sandbox.run(f"rm 5; {write(1, '7')}")).succeeded


@pytest.mark.usefixtures("alone")
async def test_files_that_were_there_before_do_not_count(kind: SandboxKind, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).write_bytes(b"x" * 10 * MB)
    async with await open_sandbox(kind, root=tmp_path, limits=QUOTA) as opened:
        assert (await opened.run(write(10, "new"))).succeeded
        assert is_refused(await opened.run(f"for i in a b c; do {write(10)}; done"))


async def test_empty_files_and_folders_count(tmp_path: Path) -> None:
    quota = DiskQuota([tmp_path], 100 * 4096, was_given=False)
    for number in range(60):
        (tmp_path / f"folder{number}").mkdir()
        (tmp_path / f"file{number}").touch()
        os.link(tmp_path / f"file{number}", tmp_path / f"again{number}")
    assert quota._measure(0) >= 120 * 4096
    assert quota._measure(0) < 180 * 4096


async def test_a_folder_that_cannot_be_read_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = DiskQuota([tmp_path], 32 * MB, was_given=False)
    monkeypatch.setattr(quota, "_free_bytes", lambda: quota._first_free - 50 * MB)
    assert quota._measure(0) == 0
    hidden = tmp_path
    for _ in range(20):  # deeper than a path can be long
        hidden = hidden / ("d" * 250)
    await asyncio.to_thread(make_deep, tmp_path, hidden)
    assert quota._measure(0) == 50 * MB


def make_deep(start: Path, end: Path) -> None:
    fd = os.open(start, os.O_RDONLY)
    for name in end.relative_to(start).parts:
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


async def test_a_command_that_writes_nothing_is_not_measured(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(DiskQuota, "_measure", lambda self, pid: measured.append(pid) or 0)
    monkeypatch.setattr(DiskQuota, "_free_bytes", lambda self: 100 * 1024 * MB)
    for _ in range(3):
        await sandbox.run("cat /etc/passwd > copy")
    assert measured == []
