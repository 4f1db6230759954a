"""The sandbox without bubblewrap: util-linux makes the namespaces, with the same view inside.

`kinds` chooses it where bubblewrap does not run. `unshare` makes user, PID, mount, IPC, UTS and
network namespaces (as root all but the user namespace). A shell, which is the first process in
them, mounts a file system of its own and unmounts the old one. The command runs below the shell,
without privileges. Must not run a command if one of these steps failed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from workers.sandbox import reaper
from workers.sandbox.command_line import find_shell
from workers.sandbox.file_view import (
    ETC_MOUNTED,
    MEMORY_FOLDERS,
    TMP_BYTES,
    FileView,
    is_in_memory,
    is_within,
)
from workers.sandbox.local import ConfinedSandbox
from workers.sandbox.sandbox_user import SandboxUser

_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--net")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
#: Program of the namespaces' first process, a shell. Its arguments are the table of mounts, the new
#: file system, and the command. The shell reports on the status pipe, which the command does not
#: inherit. Its stderr is closed before the command, because a shell reports a command that a signal
#: ended. The shell stays while the command runs: process 1 of a PID namespace ignores signals that
#: a command may send itself, and at its end the kernel kills the namespace's other processes.
_SCRIPT = """
mount -a -T "$1" && cd "$2" && pivot_root . old && umount -l old && cd / || exit 125
{loopback} || exit 125
{no_more_users}
shift 2
unset {mark}
exec 3>&2 2>/dev/null
hostname sandbox
"$@" 2>&3 3>&- {{status_fd}}>&-
code=$?
echo '"exit-code"' >&{{status_fd}}
exit $code
"""
#: Brings the loopback interface up where there is no program `ip`.
_LOOPBACK_UP = (
    "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, "
    "struct.pack('16sh14x', b'lo', 1))"
)


class NamespacesSandbox(ConfinedSandbox):
    """Runs each command in namespaces that `unshare` makes."""

    def namespaces(self, view: FileView) -> list[str]:
        """Write the table of mounts and return the arguments before each command."""
        top = self.workspace.base / "top"
        mounts = _mounts(view, self.workspace.root)
        _make_mount_points(top, view, [mount.target for mount in mounts])
        table = self.workspace.base / "mounts"
        # pivot_root needs a new root that is a mount: the first line makes it one.
        lines = [_line(str(top), str(top), "none", "bind,ro,nosuid,nodev")]
        table.write_text("".join([*lines, *(mount.line(top) for mount in mounts)]))
        user = self.workspace.user
        script = _SCRIPT.format(
            loopback=_loopback_command(),
            no_more_users="" if user else "echo 1 >/proc/sys/user/max_user_namespaces || exit 125",
            mark=reaper.MARK,
        )
        return [
            shutil.which("unshare") or "unshare",
            *(() if user else ("--user", "--map-root-user")),
            *_NAMESPACES,
            "--",
            find_shell(), "-c", script, "sh", str(table), str(top),
            *_identity(user),
        ]  # fmt: skip


class _Mount(NamedTuple):
    """One line of the table of mounts; `target` is the path inside the sandbox."""

    source: str
    target: str
    kind: str
    options: str

    def line(self, top: Path) -> str:
        """Return the line in the format of fstab(5), for a new file system at `top`."""
        place = f"{top}{self.target}"
        source = place if self.options.startswith("remount") else self.source
        is_made = is_in_memory(self.target) and self.target not in MEMORY_FOLDERS
        return _line(source, place, self.kind, self.options + ",X-mount.mkdir" * is_made)


def _mounts(view: FileView, root: Path) -> list[_Mount]:
    """Return the mounts in their order; a later one may lie inside an earlier one."""
    devices = [_Mount(f"/dev/{name}", f"/dev/{name}", "none", "bind") for name in _DEVICES]
    memory = f"mode=1777,size={TMP_BYTES},nosuid,nodev"
    is_seen = [path for path in view.readable if os.path.exists(path)]
    return [
        *(mount for folder in view.system for mount in _read_only(folder, folder)),
        _Mount("proc", "/proc", "proc", "nosuid,nodev,noexec"),
        *devices,
        _Mount("devpts", "/dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620,nosuid,noexec"),
        _Mount("shm", "/dev/shm", "tmpfs", memory),
        _Mount("tmp", "/tmp", "tmpfs", memory) if view.tmp is None else _bind(view.tmp, "/tmp"),
        *_read_only(str(view.etc), "/etc"),
        *(_read_only(ETC_MOUNTED, ETC_MOUNTED) if os.path.isdir(ETC_MOUNTED) else ()),
        *(
            mount
            for path in is_seen
            if not any(is_within(path, folder) for folder in view.system)
            for mount in _read_only(path, path)
        ),
        _bind(root, str(root)),
    ]


def _bind(source: Path, target: str) -> _Mount:
    return _Mount(str(source), target, "none", f"rbind,{_kept_flags(str(source))}")


def _read_only(source: str, target: str) -> list[_Mount]:
    """Return the mount of a path, and a remount that makes each mount below it read-only."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mount_points = [_unescaped(line.split(" ")[4]) for line in lines]
    below = [path for path in mount_points if path != source and is_within(path, source)]
    mounts = [_Mount(source, target, "none", f"rbind,ro,{_kept_flags(source)}")]
    for path in below:
        inner = target + path.removeprefix(source)
        mounts.append(_Mount("", inner, "none", f"remount,bind,ro,{_kept_flags(path)}"))
    return mounts


def _kept_flags(path: str) -> str:
    # The kernel refuses to take a flag away from a mount that another user made.
    is_noexec = os.statvfs(path).f_flag & os.ST_NOEXEC
    return "nosuid,nodev,noexec" if is_noexec else "nosuid,nodev"


def _make_mount_points(top: Path, view: FileView, targets: Sequence[str]) -> None:
    """Make the empty file system: a folder or a file for each mount, and the links."""
    for name in ("old", "proc", "dev/pts", "dev/shm", "tmp", "etc"):
        (top / name).mkdir(parents=True)
    for name, target in _DEVICE_LINKS.items():
        (top / "dev" / name).symlink_to(target)
    for path, target in view.links.items():
        (top / path.lstrip("/")).symlink_to(target)
    for target in targets:
        if is_in_memory(target):
            continue  # memory is empty when it is mounted: the mount of such a folder makes it
        is_below_etc = target != "/etc" and is_within(target, "/etc")
        place = (view.etc.parent if is_below_etc else top) / target.lstrip("/")
        if os.path.isdir(target):
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    for folder, _, _ in os.walk(top):
        os.chmod(folder, 0o755)


def _line(source: str, place: str, kind: str, options: str) -> str:
    return f"{_escaped(source)} {_escaped(place)} {kind} {options} 0 0\n"


def _escaped(path: str) -> str:
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in path)


def _unescaped(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _find_ip() -> str | None:
    return shutil.which("ip", path="/usr/sbin:/usr/bin:/sbin:/bin")


def _loopback_command() -> str:
    if _find_ip():
        return "ip link set lo up"
    return f'{os.path.realpath(sys.executable)} -I -S -c "{_LOOPBACK_UP}"'


def _identity(user: SandboxUser | None) -> list[str]:
    """Return the arguments that drop every privilege before the command."""
    setpriv = ["setpriv", "--no-new-privs", "--inh-caps=-all"]
    if user is not None:
        uid = str(user.uid)
        switch = ["--reuid", uid, "--regid", uid, "--clear-groups", "--bounding-set=-all"]
        return [*setpriv, *switch]
    # The user of a second user namespace has no rights over the first one's mounts and processes.
    own = ["unshare", "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}", "--"]
    return [*own, *setpriv]
