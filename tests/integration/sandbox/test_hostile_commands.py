"""What a hostile command tries, and that each attempt is bounded in time and memory."""

from __future__ import annotations

import asyncio
import http.server
import os
import resource
import secrets
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.sandboxes import Marked, require_kind

from workers.sandbox import file_view, namespaces
from workers.sandbox.base import Sandbox
from workers.sandbox.kinds import SandboxKind, open_sandbox
from workers.sandbox.process import ProcessSandbox
from workers.sandbox.reaper import MARK

pytestmark = [pytest.mark.timeout(60), pytest.mark.hostile]


async def test_command_that_never_returns_is_killed_at_its_timeout(
    sandbox: Sandbox, mark: Marked
) -> None:
    begun = time.monotonic()
    result = await sandbox.run(f"trap '' TERM INT HUP; : {mark}; sleep 1000", timeout_s=0.3)
    assert result.timed_out
    assert result.exit_code == 124
    assert time.monotonic() - begun < 30
    await mark.wait_gone()


async def test_whole_tree_dies_with_a_timeout_even_in_other_sessions(
    sandbox: Sandbox, mark: Marked
) -> None:
    command = textwrap.dedent(f"""
        setsid sh -c 'trap "" TERM; sleep 1000; : {mark}' &
        (setsid setsid sh -c 'sleep 1000; : {mark}' &) &
        nohup sh -c 'sleep 1000; : {mark}' >/dev/null 2>&1 &
        sleep 1000; : {mark}
    """)
    result = await sandbox.run(command, timeout_s=0.5)
    assert result.timed_out
    await mark.wait_gone()


async def test_background_processes_end_with_their_command(sandbox: Sandbox, mark: Marked) -> None:
    begun = time.monotonic()
    result = await sandbox.run(f"setsid sh -c 'sleep 1000; : {mark}' & echo done")
    assert result.stdout == "done\n"
    assert time.monotonic() - begun < 30
    await mark.wait_gone()


async def test_daemon_that_closed_everything_ends_with_its_command(
    sandbox: Sandbox, mark: Marked
) -> None:
    daemon = f"""
import os, sys, time
if os.fork(): sys.exit()
os.setsid()
if os.fork(): os._exit(0)
os.closerange(0, 100)
time.sleep(1000)  # {mark}
"""
    assert (await sandbox.run(["python3", "-c", daemon])).succeeded
    await mark.wait_gone()


async def test_fork_bomb_is_bounded_and_leaves_nothing(sandbox: Sandbox, mark: Marked) -> None:
    bomb = f"bomb() {{ : {mark}; bomb | bomb & bomb; }}; bomb"
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(mark.alive()))
            await asyncio.sleep(0.05)

    watcher = asyncio.create_task(watch())
    begun = time.monotonic()
    await sandbox.run(bomb, timeout_s=1.5)
    watcher.cancel()
    assert time.monotonic() - begun < 30
    await mark.wait_gone()
    assert most <= 400 if os.geteuid() and isinstance(sandbox, ProcessSandbox) else most <= 60
    assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_gigabyte_of_output_is_cut_and_takes_no_memory(sandbox: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    result = await sandbox.run("head -c 1073741824 /dev/zero | tr '\\0' x")
    assert result.truncated
    assert "bytes of output cut" in result.stdout
    assert len(result.stdout) < 70 * 1024
    assert time.monotonic() - begun < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_endless_output_on_both_streams_ends(sandbox: Sandbox) -> None:
    result = await sandbox.run("yes & yes >&2", timeout_s=5)
    assert result.truncated


async def test_output_that_is_no_text_is_still_text(sandbox: Sandbox) -> None:
    result = await sandbox.run("printf '\\377\\000\\033[31m'")
    assert result.stdout == "�\0\x1b[31m"


async def test_memory_is_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.run(["python3", "-c", "x = 'a' * 10**9"])
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


async def test_memory_of_many_processes_is_bounded_together(sandbox: Sandbox, mark: Marked) -> None:
    hog = f"""
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b"x") * (150 * 1024**2)  # {mark}
        time.sleep(1000)
time.sleep(1000)
"""
    begun = time.monotonic()
    result = await sandbox.run(["python3", "-c", hog])
    assert result.exit_code == 137
    assert "too much memory" in result.stderr
    assert time.monotonic() - begun < 19  # its wall clock is not what ended it
    await mark.wait_gone()


async def test_cpu_is_bounded_for_one_that_hides_from_the_clock(sandbox: Sandbox) -> None:
    result = await sandbox.run(["python3", "-c", "while True: pass"])
    assert not result.succeeded
    assert result.duration_s < 15


async def test_file_size_is_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.run("head -c 100M /dev/zero > big")
    assert not result.succeeded
    assert Path(sandbox.root, "big").stat().st_size <= 8 * 1024**2


async def test_tool_that_kills_its_parent_hurts_only_itself(sandbox: Sandbox) -> None:
    await sandbox.run("kill -9 $PPID; kill -9 1; echo still here", timeout_s=5)
    assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_killing_everything_leaves_the_worker_alive(sandbox: Sandbox) -> None:
    if os.geteuid() and isinstance(sandbox, ProcessSandbox):
        pytest.skip("an ordinary user's unconfined command can kill the worker")
    await sandbox.run("kill -9 -1; echo still here", timeout_s=5)
    assert (await sandbox.run("echo alive")).stdout == "alive\n"


async def test_process_that_cleared_its_environment_does_not_outlive_the_sandbox(
    sandbox: Sandbox, mark: Marked
) -> None:
    if os.geteuid() and isinstance(sandbox, ProcessSandbox):
        pytest.skip("an ordinary user's processes are found by their environment only")
    await sandbox.run(f"env -i setsid sh -c 'sleep 1000; : {mark}' & true")
    await mark.wait_gone()


async def test_environment_of_the_worker_cannot_be_read(sandbox: Sandbox) -> None:
    if os.geteuid() and isinstance(sandbox, ProcessSandbox):
        pytest.skip("an ordinary user's own processes can read each other")
    # Process 1 is the sandbox's own; its environment is the clean one.
    ours = Path(f"/proc/{os.getpid()}/environ").read_text()
    for pid in (os.getpid(), 1):
        seen = (await sandbox.run(f"cat /proc/{pid}/environ")).stdout
        assert not seen or "USER=sandbox" in seen
        assert seen != ours


async def test_files_outside_the_root_cannot_be_read(
    confined: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    home = Path.home()
    for path in (
        secret,
        home / ".bashrc",
        "/etc/shadow",
        Path(__file__),
        f"/proc/{os.getpid()}/environ",
    ):
        result = await confined.run(f"cat {path}")
        assert result.exit_code != 0, path
        assert result.stdout == "", path


async def test_link_planted_in_the_root_reads_nothing_outside(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    await sandbox.run(f"ln -s {secret} link; ln -s / all")
    for path in ("link", f"all{secret}"):
        with pytest.raises(PermissionError):
            await sandbox.read_file(path)
        with pytest.raises(PermissionError):
            await sandbox.write_file(path, b"x")
    assert secret.read_text() == "secret"


async def test_system_is_read_only(confined: Sandbox) -> None:
    for path in (
        "/usr/x",
        "/x",
        "/etc/x",
        "/dev/x",
        f"{sys.prefix}/x",
        "/proc/sys/kernel/hostname",
    ):
        assert (await confined.run(f"echo x > {path}")).exit_code != 0, path


async def test_private_tmp_is_shared_between_commands_and_seen_by_nobody_else(
    confined: Sandbox, confining_kind: SandboxKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreter below /tmp would make it fresh for each command.
    monkeypatch.setattr(file_view, "_python_folders", lambda: [])
    name = secrets.token_hex(8)
    async with await open_sandbox(confining_kind) as opened:
        await opened.run(f"echo x > /tmp/{name}")
        assert (await opened.run(f"cat /tmp/{name}")).stdout == "x\n"
        assert (await confined.run(f"cat /tmp/{name}")).exit_code != 0
    assert not Path("/tmp", name).exists()


async def test_links_put_in_tmp_are_not_followed_by_the_next_commands_mounts(
    confining_kind: SandboxKind, tmp_path: Path
) -> None:
    root, target = tmp_path / "root", tmp_path / "target"
    root.mkdir()
    target.mkdir()
    async with await open_sandbox(confining_kind, root=root) as opened:
        first = Path(*root.parts[:3])
        await opened.run(f"mv {first} /tmp/moved; ln -s /oldroot{target} {first}")
        await opened.run("touch made")
    assert not list(target.iterdir())
    assert [path.name for path in root.iterdir()] == ["made"]


@pytest.fixture
def web_server() -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def test_network_cannot_be_reached(confined: Sandbox, web_server: int) -> None:
    connect = f"import socket; socket.create_connection(('127.0.0.1', {web_server}), 3)"
    result = await confined.run(["python3", "-c", connect])
    assert "Connection refused" in result.stderr
    outside = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    result = await confined.run(["python3", "-c", outside])
    assert "unreachable" in result.stderr


LOOPBACK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 3)
print("connected")
"""


async def test_loopback_inside_works(confined: Sandbox) -> None:
    assert (await confined.run(["python3", "-c", LOOPBACK])).stdout == "connected\n"


async def test_loopback_works_without_the_program_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    require_kind("namespaces")
    monkeypatch.setattr(namespaces, "_find_ip", lambda: None)
    async with await open_sandbox("namespaces") as opened:
        assert (await opened.run(["python3", "-c", LOOPBACK])).stdout == "connected\n"


async def test_command_has_no_privileges(confined: Sandbox) -> None:
    status = (await confined.run("cat /proc/self/status")).stdout
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert (await confined.run("id -u")).stdout.strip() != "0" or os.geteuid()
    assert (await confined.run("mount -t tmpfs none /tmp")).exit_code != 0


#: Ways back to what the namespaces hide: each prints the secret if it succeeds.
WAYS_BACK = {
    "unmount everything": "for m in $(cut -d' ' -f2 /proc/mounts | tac); do umount -l $m; done",
    "unmount in a second user namespace": (
        "unshare --user --map-root-user --mount sh -c 'umount -l /proc /tmp /old {home} /'"
    ),
    "mount the host's folder": "mount --bind /proc/1/root /tmp; cat /tmp/{secret}",
    "root of process 1": "cat /proc/1/root/{secret}; cat /proc/1/root/old/{secret}",
    "root of the worker": "cat /proc/{worker}/root/{secret}; cat /proc/{worker}/cwd/{secret}",
    "memory of process 1": "cat /proc/1/mem /proc/1/environ /proc/1/maps",
    "namespaces of process 1": "nsenter --target 1 --user --mount cat {secret}",
    "namespaces of the worker": "nsenter --target {worker} --mount --pid cat {secret}",
    "mount namespace of a new process": (
        "unshare --user --map-root-user --mount --pid --fork --mount-proc cat {secret}"
    ),
    "left file system": "pivot_root / /old; cd /old; cat /old/{secret} ./{secret}",
    "climbing out": "cat $(printf '../%.0s' $(seq 40)){secret}",
    "changing the root": (
        "mkdir -p x; python3 -c \"import os; os.chroot('x'); os.chdir('../' * 40); "
        "os.chroot('.'); print(open('{secret}').read())\""
    ),
    "open descriptors": "for f in /proc/self/fd/* /proc/1/fd/*; do cat $f/{secret}; done",
    "device of the disk": "mknod d b 254 0; cat d | head -c 1000000 | strings",
}


@pytest.mark.parametrize("way", WAYS_BACK)
async def test_no_way_leads_back_out_of_the_namespaces(
    confined: Sandbox, way: str, tmp_path: Path
) -> None:
    path = tmp_path / "secret.txt"
    secret = secrets.token_hex(16)
    path.write_text(secret)
    tmp_path.chmod(0o755)
    command = WAYS_BACK[way].format(secret=path, home=Path.home(), worker=os.getpid())
    result = await confined.run(f"{command}; cat {path}", timeout_s=10)
    assert secret not in result.stdout + result.stderr


async def test_other_processes_cannot_be_seen(confined: Sandbox) -> None:
    listed = (await confined.run("ls -d /proc/[0-9]* | wc -l")).stdout
    assert int(listed) < 10


@pytest.mark.parametrize("started", [2, 3, 4])
async def test_commands_of_a_killed_worker_die_with_it(
    kind: SandboxKind, started: int, mark: Marked, tmp_path: Path
) -> None:
    """Also while they are only starting, when nothing is bound to the worker yet."""
    program = f"""
import asyncio
from workers.sandbox.kinds import open_sandbox
async def main():
    sandbox = await open_sandbox("{kind}")
    await sandbox.run("setsid sh -c 'sleep 1000; : {mark}' & sleep 1000; : {mark}")
asyncio.run(main())
"""
    worker = await start_program(program, tmp_path)
    async with asyncio.timeout(20):
        while len(mark.alive()) < started:
            await asyncio.sleep(0)
    worker.kill()
    await worker.wait()
    await mark.wait_gone()


async def test_mark_of_the_reaper_is_not_in_the_commands_environment(confined: Sandbox) -> None:
    seen = (await confined.run("env; cat /proc/self/environ")).stdout
    assert "HOME=/tmp" in seen
    assert MARK not in seen


async def test_worker_that_ends_leaves_no_reaper(tmp_path: Path) -> None:
    program = """
from workers.sandbox import reaper
print(reaper.mark())
"""
    worker = await start_program(program, tmp_path, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(20):
        told, _ = await worker.communicate()
    token = Marked(told.decode().strip())
    assert len(token.word) == 16
    assert not token.alive()


async def start_program(
    program: str, folder: Path, stdout: int | None = None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TMPDIR": str(folder)},  # what it leaves is removed with the test
        stdout=stdout,
    )
