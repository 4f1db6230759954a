"""A command's argument vector and environment; a shell sets its limits and then becomes it.

Called by the local sandboxes. The shell's `ulimit` sets the limits inside the new process, because
code between fork and exec (`preexec_fn`) can deadlock a process with threads. For a command that is
a string this takes no further process.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
from collections.abc import Mapping

from workers.sandbox.base import Command, SandboxLimits

_OPEN_FILES = 1024
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@functools.cache
def find_shell() -> str:
    """Return the shell that runs commands: bash, or `sh` where there is no bash."""
    return shutil.which("bash", path=_SYSTEM_PATH) or "/bin/sh"


def limited_command(
    command: Command, limits: SandboxLimits, *, cwd: str, processes: int | None = None
) -> list[str]:
    """Return the argument vector that sets the limits and then becomes the command.

    Args:
        command: A string for the shell, or an argument vector.
        limits: Limits of the command.
        cwd: Directory to change to first; the command ends with 126 if it is not there.
        processes: Overrides `limits.processes`.
    """
    # For an argument vector the plain sh, often a smaller program, is enough.
    shell = find_shell() if isinstance(command, str) else "/bin/sh"
    prelude = _ulimits(limits, shell, processes or limits.processes)
    # The locale is no part of the environment, because programs before the command would load it.
    prelude += 'export LANG="${LANG-C.UTF-8}";'
    prelude += f"cd -- {shlex.quote(cwd)} || exit 126;"
    if isinstance(command, str):
        return [shell, "-c", f"{prelude}\n{command}"]
    return [shell, "-c", f'{prelude}exec "$@"', "sh", *command]


def clean_environment(
    *, home: str, search_path: str, extra: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the environment of a command, without any variable of the worker."""
    return {
        "PATH": f"{search_path}:{_SYSTEM_PATH}" if search_path else _SYSTEM_PATH,
        "HOME": home,
        "TMPDIR": home,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "TERM": "dumb",
        "PAGER": "cat",
        **(extra or {}),
    }


def _ulimits(limits: SandboxLimits, shell: str, processes: int) -> str:
    # bash names the process limit -u, dash and busybox -p. Called as bash it counts file sizes in
    # blocks of 1024 bytes, and called as sh in 512, as the others do.
    process_flag = "u" if os.path.basename(os.path.realpath(shell)) == "bash" else "p"
    block = 1024 if os.path.basename(shell) == "bash" else 512
    values = {
        "c": 0,
        "t": math.ceil(limits.cpu_s),
        "v": max(1, limits.memory_bytes // 1024),
        "f": max(1, limits.file_bytes // block),
        "n": _OPEN_FILES,
        process_flag: processes,
    }
    # A limit that is already lower cannot be raised; the command runs under the lower one.
    lines = "".join(f"ulimit -{flag} {value};" for flag, value in values.items())
    return f"{{ {lines} }} 2>/dev/null;"
