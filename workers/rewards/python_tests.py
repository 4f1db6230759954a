"""The reward `python_tests`: 1.0 if a function passes the row's unit tests, else 0.0.

The registry imports this module on first use. Rows have `prompt` (the function's head),
`entry_point` and `test` (which defines `check(candidate)`). Inside the sandbox the candidate runs
in one process and the tests in another (`test_runner.py`). The candidate gets arguments and returns
plain data. So patched builtins, objects equal to everything, frame tricks, early exits and printed
verdicts do not change the verdict. The tests use the prompt's own helpers, also if the candidate
defines them again. Must not give 0.0 for a failure of our own.

Not covered: a candidate that recognises the tests' arguments and returns the expected results;
tests that look into the candidate (source, signature, coroutines, arrays); and a candidate that
attacks the worker itself in the sandbox `process`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import secrets
import sys
import sysconfig
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.rewards import test_runner, wire_values
from workers.rewards.registry import register_reward
from workers.sandbox.base import CommandResult, SandboxFailure, SandboxLimits
from workers.sandbox.kinds import SandboxKind, open_sandbox

DEFAULT_TIMEOUT_S = 10.0
_MEMORY_BYTES = 1024**3
_FENCES = ("```", "~~~")
#: Without site hooks, because they take longer to start than a candidate takes to run. The program
#: itself puts the packages of this environment on the path.
_PYTHON = ("python3", "-S", "-s", "-P", "-c")

_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


@register_reward("python_tests", bounds_itself=True)
async def python_tests(
    response: str,
    prompt: Mapping[str, Any],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sandbox: SandboxKind = "auto",
) -> float:
    """Return 1.0 when the candidate passes, 0.0 when it fails, crashes, exits or runs out of time.

    Args:
        response: The answer. The candidate is its last fenced block that defines the entry point,
            else its last block, else all of it.
        prompt: The row, with `prompt`, `entry_point` and `test`.
        timeout_s: CPU seconds of the candidate. The limit in real time is twice that, because other
            processes use the CPU too.
        sandbox: Kind of sandbox on the worker's machine, as in `open_sandbox`.

    Raises:
        ValueError: The row lacks a field, or its test cannot be executed at all.
        SandboxFailure: The sandbox did not start or died, or this machine has no sandbox that
            confines the candidate. The candidate is not the cause.
    """
    job = {
        # If the column `prompt` was enqueued as the prompt, the payload has it as `content`.
        "prompt": _field(prompt, "prompt" if "prompt" in prompt else "content"),
        "test": _field(prompt, "test"),
        "entry_point": _field(prompt, "entry_point"),
        "candidate": candidate_in(response, _field(prompt, "entry_point")),
        "token": secrets.token_hex(16),
        "python": list(sys.version_info[:2]),
        "path": _package_folders(),
    }
    limits = SandboxLimits(
        wall_s=2 * timeout_s, cpu_s=timeout_s, memory_bytes=_MEMORY_BYTES, file_bytes=64 * 1024**2
    )
    # The wait for a slot comes first, so that the candidate's time does not include it.
    async with _slot(), await open_sandbox(sandbox, limits=limits) as opened:
        result = await opened.run(
            [*_PYTHON, _program()],
            stdin=json.dumps(job).encode(),
            env={"PYTHONHASHSEED": "0"},
        )
    return _read_verdict(result, job["token"])


def candidate_in(answer: str, entry_point: str) -> str:
    """Return the last fenced block that defines the entry point.

    Later blocks show its use or its output. Without such a block the last block continues the
    prompt; without any block the whole answer does.
    """
    blocks = _code_blocks(answer)
    name = re.escape(entry_point.split(".")[0].split("(")[0])
    defines = re.compile(
        rf"^[ \t]*(?:(?:async\s+)?def|class)\s+{name}\b|^{name}\s*[:=][^=]", re.MULTILINE
    )
    return next(filter(defines.search, reversed(blocks)), blocks[-1] if blocks else answer)


def _code_blocks(text: str) -> list[str]:
    """Return the contents of the fenced blocks; one that is never closed reaches to the end."""
    blocks: list[list[str]] = []
    fence = ""
    for line in text.splitlines():
        mark = line.strip()
        if not fence and mark.startswith(_FENCES):
            fence = mark[: len(mark) - len(mark.lstrip(mark[0]))]
            blocks.append([])
        elif fence and mark.startswith(fence) and not mark.strip(fence[0]):
            fence = ""
        elif fence:
            blocks[-1].append(line)
    return ["\n".join(block) + "\n" for block in blocks]


def _read_verdict(result: CommandResult, token: str) -> float:
    lines = [
        line.split(" ", 2)[1:] for line in result.stdout.splitlines() if line.startswith(token)
    ]
    if ["started"] not in lines:
        reason = result.stderr.strip()[-500:] or f"exit code {result.exit_code}"
        raise SandboxFailure(f"The tests did not start in the sandbox: {reason}")
    for line in lines:
        if line[0] == "invalid":
            raise ValueError(f"the row cannot be scored: {json.loads(line[1])}")
    return float(any(line[0] == "passed" for line in lines))


def _field(prompt: Mapping[str, Any], name: str) -> str:
    value = prompt.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"python_tests needs a text in the row's field {name!r}, which is {repr(value)[:80]}; "
            f"the row has {', '.join(map(str, prompt)) or 'no fields'}"
        )
    return value


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    return _slots.setdefault(loop, asyncio.Semaphore(2 * (os.cpu_count() or 1)))


@functools.cache
def _program() -> str:
    """Return the test runner as one program, because the sandbox does not have this package."""
    values = Path(wire_values.__file__).read_text()
    return (
        "import sys, types\n"
        f"for name in {['workers', 'workers.rewards', wire_values.__name__]!r}:\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        f"exec({values!r}, module.__dict__)\n"
        f"exec({Path(test_runner.__file__).read_text()!r})\n"
    )


@functools.cache
def _package_folders() -> list[str]:
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
