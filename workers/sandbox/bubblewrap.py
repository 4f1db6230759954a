"""The preferred sandbox: bubblewrap makes the namespaces, and limits hold inside them.

No network, a read-only system, a private /tmp, one writable directory, no sight of other processes.
`kinds` chooses it where bubblewrap runs. As root the command runs as a user of its own
(`sandbox_user`); as an ordinary user in a user namespace. Must not run a command outside
bubblewrap, whatever fails.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

from workers.sandbox import reaper
from workers.sandbox.file_view import ETC_MOUNTED, MEMORY_FOLDERS, TMP_BYTES, FileView
from workers.sandbox.local import ConfinedSandbox
from workers.sandbox.sandbox_user import SandboxUser


class BubblewrapSandbox(ConfinedSandbox):
    """Runs each command in namespaces that bubblewrap makes."""

    def namespaces(self, view: FileView) -> list[str]:
        """Return bubblewrap with its options."""
        argv = [
            shutil.which("bwrap") or "bwrap",
            "--die-with-parent", "--json-status-fd", "{status_fd}", "--cap-drop", "ALL",
            "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net",
            "--unshare-cgroup-try", "--hostname", "sandbox", "--unsetenv", reaper.MARK,
        ]  # fmt: skip
        for path in view.system:
            argv += ["--ro-bind", path, path]
        for path, target in view.links.items():
            argv += ["--symlink", target, path]
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--perms", "1777"]
        argv += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        if view.tmp is None:
            argv += ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"]
        else:
            argv += ["--bind", str(view.tmp), "/tmp"]
        argv += ["--ro-bind", str(view.etc), "/etc"]
        argv += ["--ro-bind-try", ETC_MOUNTED, ETC_MOUNTED]
        for path in view.readable:
            argv += [*_parents(path), "--ro-bind-try", path, path]
        argv += [*_parents(self.root), "--bind", self.root, self.root]
        return [*argv, "--chdir", "/", "--remount-ro", "/", *_identity(self.workspace.user)]


def _parents(path: str) -> list[str]:
    """Return the options that make the folders above a mount point.

    Folders that bubblewrap makes by itself are closed to other users.
    """
    above = [str(folder) for folder in reversed(Path(path).parents[:-1])]
    missing = [folder for folder in above if folder not in ("/dev", *MEMORY_FOLDERS)]
    return [option for folder in missing for option in ("--dir", folder)]


def _identity(user: SandboxUser | None) -> list[str]:
    """Return the last options, and the program that switches to the sandbox's user."""
    if user is None:
        return ["--unshare-user", "--"]
    uid = str(user.uid)
    capabilities = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if chroot := _find_chroot():
        # chroot costs half of setpriv. The new root is the old one: only the user changes.
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
    version = subprocess.run([chroot, "--version"], capture_output=True, text=True, check=False)
    return chroot if "coreutils" in version.stdout else None
