from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from fixtures.sandboxes import children

from workers.sandbox import kinds
from workers.sandbox.base import Sandbox, SandboxFailure, SandboxLimits
from workers.sandbox.kinds import open_sandbox
from workers.sandbox.process import ProcessSandbox

pytestmark = pytest.mark.timeout(60)


async def test_shell_command_gives_its_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.succeeded
    assert not result.timed_out
    assert not result.truncated
    assert result.duration_s > 0


async def test_argument_vector_is_not_read_by_a_shell(sandbox: Sandbox) -> None:
    result = await sandbox.run(["echo", "$HOME; a  b", "-n"])
    assert result.stdout == "$HOME; a  b -n\n"


async def test_unknown_program_exits_with_127(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["no-such-program"])).exit_code == 127
    assert (await sandbox.run("no-such-program")).exit_code == 127


async def test_signal_is_reported_as_128_plus_its_number(sandbox: Sandbox) -> None:
    assert (await sandbox.run("kill -9 $$")).exit_code == 137


async def test_commands_start_in_the_root_and_cwd_is_relative_to_it(sandbox: Sandbox) -> None:
    await sandbox.write_file("sub/file.txt", b"x")
    assert (await sandbox.run("pwd")).stdout.strip() == sandbox.root
    assert (await sandbox.run("ls", cwd="sub")).stdout == "file.txt\n"
    missing = await sandbox.run("ls", cwd="nowhere")
    assert missing.exit_code == 126
    assert "nowhere" in missing.stderr


async def test_files_are_shared_between_commands_and_the_caller(sandbox: Sandbox) -> None:
    await sandbox.write_file("a/b.txt", b"one\n")
    result = await sandbox.run("echo two >> a/b.txt && echo new > c.txt")
    assert result.succeeded, result.stderr
    assert await sandbox.read_file("a/b.txt") == b"one\ntwo\n"
    assert await sandbox.read_file("c.txt") == b"new\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.read_file("nothing.txt")
    with pytest.raises(PermissionError):
        await sandbox.read_file("../../etc/passwd")


async def test_stdin_is_fed_whole_and_is_empty_by_default(sandbox: Sandbox) -> None:
    data = b"x" * 300_000
    assert (await sandbox.run("wc -c", stdin=data)).stdout.strip() == "300000"
    assert (await sandbox.run("wc -c")).stdout.strip() == "0"


async def test_command_that_ignores_a_large_stdin_ends_normally(sandbox: Sandbox) -> None:
    assert (await sandbox.run("echo done", stdin=b"x" * 5_000_000)).stdout == "done\n"


async def test_environment_holds_what_was_given_and_nothing_of_ours(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    result = await sandbox.run("env; cat /proc/self/environ", env={"GIVEN": "yes"})
    assert "GIVEN=yes" in result.stdout
    assert "sk-secret" not in result.stdout
    assert "OPENAI_API_KEY" not in result.stdout


async def test_the_running_python_is_the_one_found(sandbox: Sandbox) -> None:
    result = await sandbox.run(["python3", "-c", "import sys; print(sys.version_info[0])"])
    assert result.stdout == "3\n", result.stderr


async def test_commands_run_side_by_side_without_harm(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(f"sleep 0.05; echo {n}") for n in range(8)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]


async def test_closing_returns_a_given_directory_and_removes_a_made_one(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    before = (tmp_path / "old.txt").stat()
    async with await open_sandbox(root=tmp_path) as given:
        assert (await given.run("echo new > new.txt; echo more >> old.txt")).succeeded
    after = (tmp_path / "new.txt").stat()
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert (tmp_path / "old.txt").read_text() == "oldmore\n"
    async with await open_sandbox() as made:
        root = Path(made.root)
        assert root.is_dir()
    assert not root.exists()
    await made.close()
    with pytest.raises(SandboxFailure, match="closed"):
        await made.run("true")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
async def test_root_in_memory_is_the_only_part_of_it_that_a_command_sees(
    kind: kinds.SandboxKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o711)
        Path(folder, "other").touch(0o644)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        async with await open_sandbox(kind) as sandbox:
            assert sandbox.root.startswith(folder)
            for _ in range(2):  # the second command meets what the first one left
                result = await sandbox.run(f"ls {folder}/other; echo kept >> kept")
                assert result.exit_code == 0, result.stderr
                assert (result.stdout == f"{folder}/other\n") is (kind == "process")
            assert await sandbox.read_file("kept") == b"kept\nkept\n"
        assert sorted(os.listdir(folder)) == ["other"]


async def test_root_that_is_not_there_is_a_sandbox_failure(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match="would not start"):
        await open_sandbox(root=tmp_path / "nowhere")


async def test_root_removed_meanwhile_is_a_sandbox_failure_not_a_result(
    kind: kinds.SandboxKind, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    async with await open_sandbox(kind, root=root) as opened:
        root.rmdir()
        with pytest.raises(SandboxFailure, match="would not start"):
            await opened.run("true")


async def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="bubblewrap"):
        await open_sandbox("chroot")  # pyright: ignore[reportArgumentType]


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine on which nothing that makes namespaces is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kinds, "_obstacles", {})
    kinds._warn_once.cache_clear()
    yield
    kinds._warn_once.cache_clear()


@pytest.mark.usefixtures("no_programs")
async def test_kind_that_does_not_run_here_is_refused_and_says_how_to_install_it() -> None:
    with pytest.raises(SandboxFailure, match=r"bwrap is not installed.*Install the package"):
        await open_sandbox("bubblewrap")
    with pytest.raises(SandboxFailure, match="unshare is not installed"):
        await open_sandbox("namespaces")


@pytest.mark.skipif(os.geteuid() == 0, reason="root has users of its own for commands")
@pytest.mark.usefixtures("no_programs")
async def test_auto_refuses_a_user_whose_commands_nothing_would_confine() -> None:
    with pytest.raises(SandboxFailure, match=r'refused.*bwrap.*unshare.*sandbox = "process"'):
        await open_sandbox()
    assert kinds.choose_local().kind is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users of its own for commands")
@pytest.mark.usefixtures("no_programs")
async def test_auto_of_root_without_namespaces_confines_in_part_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with await open_sandbox() as opened:
                assert (await opened.run("id -u")).stdout.strip() != "0"
    (warning,) = [one for one in caplog.records if "confined only in part" in one.message]
    assert "the program bwrap is not installed" in warning.message


async def test_default_of_a_worker_is_what_auto_stands_for() -> None:
    kinds.set_default_kind("process")
    try:
        async with await open_sandbox() as opened:
            assert isinstance(opened, ProcessSandbox)
    finally:
        kinds.set_default_kind("auto")


def test_kind_that_failed_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kinds, "_obstacles", {})
    with monkeypatch.context() as bare:
        bare.setenv("PATH", str(tmp_path))
        reason = kinds.obstacle_of("namespaces")
    assert kinds.obstacle_of("namespaces") == reason
    kinds._obstacles["namespaces"] = (reason, time.monotonic() - 61)
    assert kinds.obstacle_of("namespaces") != reason


@pytest.mark.parametrize("value", [0, -1])
def test_limits_that_allow_nothing_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="memory_bytes must be positive"):
        SandboxLimits(memory_bytes=value)


def test_sandbox_runs_on_uvloop_in_a_thread_that_is_not_the_main_one() -> None:
    outcome: list[str] = []

    async def run() -> None:
        async with await open_sandbox() as opened:
            results = await asyncio.gather(*(opened.run("echo hi") for _ in range(5)))
            outcome.extend(result.stdout for result in results)

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    thread.join(30)
    assert outcome == ["hi\n"] * 5


async def test_many_commands_leave_no_descriptor_and_no_child(sandbox: Sandbox) -> None:
    await sandbox.run("true")
    gc.collect()
    descriptors, before = len(os.listdir("/proc/self/fd")), children()
    await asyncio.gather(*(sandbox.run("echo x", stdin=b"y") for _ in range(40)))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert children() == before


async def test_cancelled_command_is_killed_at_once(sandbox: Sandbox) -> None:
    await sandbox.run("true")
    before = children()
    task = asyncio.create_task(sandbox.run("touch started; sleep 1000"))
    async with asyncio.timeout(10):
        while not Path(sandbox.root, "started").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert children() == before
