"""The directories of the private servers' data and sockets.

Normally they are below the data directory: `postgres/` and `redis/`. There are two exceptions:

- A socket path is limited to about 100 bytes, and libpq splits a host at commas. If the path is
  unsuitable, the server's sockets go to a short directory in the temporary folder.
- PostgreSQL does not run as root. For root it runs as another account, which often cannot reach the
  data directory (below `/root`, mode 700). We do not change the mode of foreign directories.
  Instead the cluster goes to `/var/lib/rollout-pipeline`, which survives reboots and is never
  cleaned up. If that is not writable, `/var/tmp` is used. Temporary clusters go to the temporary
  folder.

Both kinds of directories have unguessable names, belong to one account, and are recorded in
`services.json` of the data directory. The record is not valid in a copy of the data directory,
because two servers must not share a directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded.processes import Account, run_as, server_environment

#: Accounts that may run PostgreSQL for root, in order of preference.
ROOT_ACCOUNTS = ("rollout", "nobody")

SOCKET_PATH_BYTES = 100


@dataclass(frozen=True, slots=True)
class ServerPaths:
    """A server's directory, the directory of its socket, and the account that owns both."""

    home: Path
    sockets: Path
    account: Account | None = None


class ServerDirectories:
    """The servers' paths in one data directory; call with its lock held, except for `find`."""

    def __init__(self, data_dir: Path, *, durable: bool) -> None:
        self._data_dir = data_dir
        self._record = data_dir / "services.json"
        self._durable = durable

    def find(self, name: str) -> ServerPaths:
        """Return the paths that a server has or would get; creates nothing."""
        record = self._read_record()
        home = Path(record.get(f"{name}_home", self._data_dir / name))
        sockets = Path(record.get(f"{name}_sockets", home))
        return ServerPaths(home, sockets)

    def prepare(self, name: str, *, socket_name: str, not_as_root: bool) -> ServerPaths:
        """Create a server's directories, owned by the account that runs it."""
        account = None
        if not_as_root and os.geteuid() == 0:
            account = _account_for_root(self.find(name).home)
        home = self._prepare_home(name, account)
        return ServerPaths(home, self._prepare_sockets(name, home, socket_name, account), account)

    def forget(self, *names: str) -> None:
        """Delete the servers' directories with everything in them."""
        for paths in [self.find(name) for name in names]:
            shutil.rmtree(paths.home, ignore_errors=True)
            shutil.rmtree(paths.sockets, ignore_errors=True)
        self._record.unlink(missing_ok=True)

    def _prepare_home(self, name: str, account: Account | None) -> Path:
        home = self.find(name).home
        if home.parent == self._data_dir and not _can_enter(account, self._data_dir):
            home = self._make_outside_home(account)
            self._write_record(f"{name}_home", home)
        home.mkdir(mode=0o700, exist_ok=True)
        _change_owner(home, account)
        return home

    def _make_outside_home(self, account: Account | None) -> Path:
        stem = f"{self._data_dir.name.lstrip('.') or 'data'}-"
        for base in self._outside_bases():
            with contextlib.suppress(OSError):
                _make_enterable(base)
                if _can_enter(account, base):
                    return Path(tempfile.mkdtemp(prefix=stem, dir=base))
        raise ServiceUnavailable(
            f"The account {account.name if account else ''} cannot reach {self._data_dir}.",
            why="PostgreSQL does not run as root, and no other place for its data can be written.",
            remedy="Choose a data directory that every user can enter, or run as another user.",
            code="E213",
        )

    def _outside_bases(self) -> list[Path]:
        if not self._durable:
            return [Path(tempfile.gettempdir()), Path("/tmp")]
        return [Path("/var/lib/rollout-pipeline"), Path("/var/tmp")]

    def _prepare_sockets(
        self, name: str, home: Path, socket_name: str, account: Account | None
    ) -> Path:
        if _fits_socket(home / socket_name):
            return home
        sockets = self.find(name).sockets
        owner = account.uid if account else os.geteuid()
        if sockets != home and _is_private(sockets, owner):
            return sockets
        # The path must be short, so a temporary folder with a long path cannot be used either.
        base = tempfile.gettempdir()
        if not _fits_socket(Path(base, "rollout-12345678", socket_name)):
            base = "/tmp"
        sockets = Path(tempfile.mkdtemp(prefix="rollout-", dir=base))
        _change_owner(sockets, account)
        self._write_record(f"{name}_sockets", sockets)
        return sockets

    def _read_record(self) -> dict[str, str]:
        try:
            record = json.loads(self._record.read_text())
            inode, path = record["inode"], record["data_dir"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        copied = (
            path != str(self._data_dir)
            and inode != self._data_dir.stat().st_ino
            and os.path.isdir(path)
        )
        return {} if copied else record

    def _write_record(self, key: str, value: Path) -> None:
        record = self._read_record() | {
            "data_dir": str(self._data_dir),
            "inode": self._data_dir.stat().st_ino,
            key: str(value),
        }
        part = self._record.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(self._record)


def _account_for_root(home: Path) -> Account:
    """Return the owner of an existing cluster, else the first account that this machine has."""
    with contextlib.suppress(OSError, KeyError):
        if (owner := home.stat().st_uid) != 0:
            entry = pwd.getpwuid(owner)
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    for name in ROOT_ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise ServiceUnavailable(
        "PostgreSQL does not run as root, and this machine has no account to run it as.",
        remedy=f"Create an account `{ROOT_ACCOUNTS[0]}`, or set ROLLOUT_DATABASE__URL.",
        code="E213",
    )


def _can_enter(account: Account | None, directory: Path) -> bool:
    """Test access as that account, because mode bits do not include ACLs and mount options."""
    if account is None:
        return True
    tried = subprocess.run(
        ["/bin/sh", "-c", 'cd "$1" 2>/dev/null', "sh", str(directory)],
        cwd="/",
        env=server_environment(),
        check=False,
        **run_as(account),
    )
    return tried.returncode == 0


def _change_owner(directory: Path, account: Account | None) -> None:
    if account is not None and directory.stat().st_uid != account.uid:
        os.chown(directory, account.uid, account.gid)


def _make_enterable(base: Path) -> None:
    if not base.exists():
        base.mkdir()
        base.chmod(0o755)  # overrides the umask, because another account must enter


def _fits_socket(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES and "," not in str(path)


def _is_private(directory: Path, owner: int) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077
