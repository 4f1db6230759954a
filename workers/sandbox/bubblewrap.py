"""The sandbox of choice: namespaces made by bubblewrap, with process limits inside.

No network, a read-only system, a private /tmp, one writable directory, no sight of other
processes. Chosen by `backends` where `probe` finds that bubblewrap runs. As root, bubblewrap sets
the namespaces up and the command runs as a user of its own (see `lending`); as an ordinary user
it does so in a user namespace. Must not run a command outside bubblewrap, whatever fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.sandbox import reaper
from workers.sandbox.base import (
    ClosingSandbox,
    Command,
    CommandResult,
    SandboxFailure,
    SandboxLimits,
)
from workers.sandbox.lending import LentUser
from workers.sandbox.shell import clean_environment, is_within, limited_command
from workers.sandbox.subprocesses import (
    ChildSpec,
    FinishedProcess,
    as_result,
    kill_group,
    run_child,
)
from workers.sandbox.workspace import Workspace

#: Mounted or copied into the sandbox's own /etc; nothing else of the system's /etc is seen.
_ETC_MOUNTED = "/etc/alternatives"
_ETC_COPIED = ("ld.so.cache", "localtime")
_TMP_BYTES = 256 * 1024**2


class BubblewrapSandbox(ClosingSandbox):
    """Runs each command in fresh namespaces around one writable directory.

    /tmp is private to the sandbox and lasts as long as it; where a directory of the interpreter or
    the root itself lies below /tmp, it is fresh for each command instead.

    Args:
        root: The writable directory, seen inside under the same path; None makes one that is
            removed on close.
        limits: What a command may use.
        readable: Further paths that commands may read.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None, limits: SandboxLimits, readable: Sequence[str]
    ) -> None:
        self._limits = limits
        self._workspace = Workspace(root, limits.file_bytes)
        try:
            self._prefix = _namespaces(self._workspace, readable)
        except OSError as error:
            self._workspace.close()
            raise SandboxFailure(f"The sandbox would not start: {error}") from error
        self.local_files = self._workspace.files
        self._closed = False

    @property
    def root(self) -> str:
        """The writable directory; the same path inside and outside."""
        return str(self._workspace.root)

    async def run(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command in namespaces of its own; see `Sandbox.run`."""
        if self._closed:
            raise SandboxFailure("The sandbox is closed.")
        spec = ChildSpec(
            argv=[
                *self._prefix,
                *limited_command(command, self._limits, cwd=os.path.join(self.root, cwd or ".")),
            ],
            env=_environment(search_path=_python_path(), extra=env),
            cwd="/",
            stdin=stdin,
            kill=kill_group,
            has_status=True,
        )
        finished = await run_child(
            spec,
            wall_s=self._limits.bound_wall_s(timeout_s),
            output_bytes=self._limits.output_bytes,
            memory_bytes=self._limits.memory_bytes,
        )
        _check_alive(finished)
        return as_result(finished)

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file under the root."""
        return await asyncio.to_thread(self._workspace.files.read, path)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file under the root, making the directories above it."""
        await asyncio.to_thread(self._workspace.files.write, path, data, make_folders=True)

    async def close(self) -> None:
        """Give the directory back and remove what was temporary."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._workspace.close)


@functools.cache
def probe() -> str:
    """Run bubblewrap once and return why it does not work here; empty if it does."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    with tempfile.TemporaryDirectory(prefix="rollout-sandbox-probe-") as folder:
        try:
            sandbox = BubblewrapSandbox(folder, SandboxLimits(), ())
        except (OSError, SandboxFailure) as error:
            return str(error)
        try:
            argv = [word.replace("{status_fd}", "2") for word in sandbox._prefix]
            ended = subprocess.run(
                [*argv, *limited_command(["true"], SandboxLimits(), cwd=folder)],
                env=_environment(search_path="", extra=None),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, SandboxFailure) as error:
            return str(error)
        finally:
            sandbox._workspace.close()
    if ended.returncode != 0:
        return ended.stderr.decode(errors="replace").strip().splitlines()[-1:][0]
    return ""


def _check_alive(finished: FinishedProcess) -> None:
    # bubblewrap reports the command's exit code on its status pipe; an end without that report
    # is its own failure, or somebody killed it.
    was_killed = finished.timed_out or finished.out_of_memory
    if not was_killed and '"exit-code"' not in finished.status:
        reason = finished.stderr.strip()[-500:] or f"bwrap ended with {finished.returncode}"
        raise SandboxFailure(f"The sandbox would not start or died: {reason}")


def _namespaces(workspace: Workspace, readable: Sequence[str]) -> list[str]:
    root = workspace.root
    words = [
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent", "--json-status-fd", "{status_fd}", "--cap-drop", "ALL",
        "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try",
        "--hostname", "sandbox", "--unsetenv", reaper.MARK,
    ]  # fmt: skip
    words += _system()
    mounts = [path for path in [*_python_folders(), *readable] if not is_within(path, str(root))]
    # Never mount below a directory that commands write: they could have put links in the way,
    # and bubblewrap would follow them with the worker's privileges.
    if any(is_within(path, "/tmp") for path in [*mounts, str(root)]):
        words += ["--size", str(_TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"]
    else:
        words += ["--bind", str(workspace.scratch), "/tmp"]
    words += ["--ro-bind", str(_make_etc(workspace)), "/etc"]
    words += ["--ro-bind-try", _ETC_MOUNTED, _ETC_MOUNTED]
    for path in mounts:
        words += [*_parents(path), "--ro-bind-try", path, path]
    words += [*_parents(root), "--bind", str(root), str(root)]
    words += ["--chdir", "/", "--remount-ro", "/"]
    return words + _identity(workspace.user)


def _environment(*, search_path: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    """Return bubblewrap's environment: the command's, and the mark that it takes out of it."""
    clean = clean_environment(home="/tmp", search_path=search_path, extra=extra)
    return clean | {reaper.MARK: reaper.mark()}


def _make_etc(workspace: Workspace) -> Path:
    """Prepare the /etc the commands see: names, the library cache, no configuration or keys."""
    etc = workspace.base / "etc"
    (etc / os.path.basename(_ETC_MOUNTED)).mkdir(parents=True)
    uid = workspace.user.uid if workspace.user else os.getuid()
    gid = workspace.user.uid if workspace.user else os.getgid()
    texts = {
        "passwd": f"root:x:0:0:root:/:/bin/sh\nsandbox:x:{uid}:{gid}:sandbox:/tmp:/bin/sh\n",
        "group": f"root:x:0:\nsandbox:x:{gid}:\n",
        # Without it, every look-up of a name would try whatever services the system's names.
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
    for name in _ETC_COPIED:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"/etc/{name}", etc / name)
    for path in (etc, *etc.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return etc


def _parents(path: str | os.PathLike[str]) -> list[str]:
    """Make the folders above a mount point: bubblewrap's own are closed to other users."""
    above = [str(folder) for folder in reversed(Path(path).parents[:-1])]
    return [word for folder in above if folder != "/tmp" for word in ("--dir", folder)]


@functools.cache
def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/", name)
        if folder.is_symlink():
            words += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(_TMP_BYTES), "--perms", "1777"]
    return [*words, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]


def _identity(user: LentUser | None) -> list[str]:
    if user is None:
        return ["--unshare-user", "--"]
    uid = str(user.uid)
    capabilities = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if chroot := _find_chroot():
        # Half the cost of setpriv. The new root is the old one: only the user changes.
        switch = [chroot, f"--userspec=+{uid}:+{uid}", "--groups=", "/"]
        return [*capabilities, "--cap-add", "CAP_SYS_CHROOT", "--", *switch]
    switch = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps=-all"]
    return [*capabilities, "--", *switch]


@functools.cache
def _find_chroot() -> str | None:
    """Return the program chroot if it is the one of coreutils, which can switch the user."""
    chroot = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if chroot is None:
        return None
    told = subprocess.run([chroot, "--version"], capture_output=True, text=True, check=False)
    return chroot if "coreutils" in told.stdout else None


@functools.cache
def _python_folders() -> list[str]:
    """Return the folders of the running interpreter that are not in the system's own."""
    folders = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix))
    return [folder for folder in folders if not is_within(folder, "/usr")]


def _python_path() -> str:
    return os.path.join(os.path.realpath(sys.prefix), "bin")
