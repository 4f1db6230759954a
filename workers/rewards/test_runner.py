"""The program inside the sandbox that runs the tests of a candidate in two processes.

The reward `python_tests` starts it with the source of this file and of `wire_values.py`, and a job
on its standard input. The first process runs the tests. The second, forked before the job is read,
runs the candidate and is called by messages of plain data. The first rebuilds values from built-in
types, so the candidate controls only its return values. Must not import another module of this
project, because the sandbox has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import socket
import struct
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.rewards.wire_values import Remote, Values, rebuild_exception, take_over

_PR_SET_DUMPABLE = 4
_MOST_BYTES = 32 * 1024 * 1024
_MOST_PRINTED = 1024 * 1024
#: Operations that each process performs for the other one.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "iter": iter,
    "next": next,
}


class CandidateGone(BaseException):
    """The candidate's process ended or broke the protocol; tests must not catch this error."""


class Peer(Values):
    """One end of the connection between the two processes.

    The other end may perform the `operations` on objects of this process.
    """

    def __init__(
        self, connection: socket.socket, operations: Mapping[str, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self._connection = connection
        self._operations = operations
        self._lock = threading.RLock()
        self.is_gone = False

    def send(self, message: Any) -> None:
        """Send one message."""
        data = json.dumps(message).encode()
        self._connection.sendall(struct.pack(">I", len(data)) + data)

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: The other process has ended, or sends a message that is too large.
        """
        (size,) = struct.unpack(">I", self._read(4))
        if size > _MOST_BYTES:
            raise EOFError("message too large")
        return json.loads(self._read(size))

    def ask(
        self,
        operation: str,
        handle: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Request an operation of the other end, and answer its requests until the reply comes."""
        with self._lock:
            request: list[Any] = [operation, handle, [self.encode(arg) for arg in args]]
            request.append({name: self.encode(value) for name, value in (kwargs or {}).items()})
            try:
                self.send(request)
                while len(reply := self.receive()) == 4:
                    self.send(self.answer(reply))
                kind, value, changed = reply
                sys.stdout.write(changed.pop())
                for arg, new in zip(args, changed, strict=False):
                    take_over(arg, new if new is None else self.decode(new))
                value = rebuild_exception(value, self) if kind == "raised" else self.decode(value)
            except BaseException as error:
                self.is_gone = True
                raise CandidateGone(repr(error)) from None
            if kind == "raised":
                raise value
            return value

    def answer(self, request: Any) -> list[Any]:
        """Perform a requested operation and return the reply."""
        printed = io.StringIO()
        try:
            operation, handle, args, kwargs = request
            if operation not in self._operations:
                raise TypeError(f"{operation} is not allowed")
            target = self._objects[handle]
            values = [self.decode(arg) for arg in args]
            named = {name: self.decode(value) for name, value in kwargs.items()}
            with contextlib.redirect_stdout(printed):
                result = self._operations[operation](target, *values, **named)
            changed = [
                self.encode_changed(value, old) for value, old in zip(values, args, strict=False)
            ]
            return ["returned", self.encode(result), [*changed, printed.getvalue()[:_MOST_PRINTED]]]
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            try:
                details = [self.encode(arg) for arg in error.args]
            except Exception:
                details = []
            return ["raised", [names, details], [printed.getvalue()[:_MOST_PRINTED]]]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            data += part
        return bytes(data)


def _run_prompt(prompt: str, module: types.ModuleType) -> dict[str, type]:
    """Execute a prompt, whose last function is unfinished; return the classes it defines."""
    for ending in ("", "\n    pass\n", "\n        pass\n"):
        with contextlib.suppress(SyntaxError, ValueError):
            code = compile(prompt + ending, "<prompt>", "exec")
            with contextlib.suppress(Exception):
                exec(code, module.__dict__)
            break
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _assembled(prompt: str, code: str, entry_point: str) -> str:
    """Return the candidate as a program, whether its code repeats the prompt or continues it."""
    name = entry_point.split(".")[0].split("(")[0]
    defined = re.compile(
        rf"^(?:async\s+def|def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]", re.MULTILINE
    )
    code = textwrap.dedent(code) if defined.search(textwrap.dedent(code)) else code
    if defined.search(code):
        return code
    body = code.strip("\n")
    first_indented = body[:1] in (" ", "\t")
    ways = [prompt.rstrip() + "\n" + body, prompt.rstrip() + "\n" + textwrap.indent(body, "    ")]
    ways.append(prompt.rstrip() + "\n    " + body)
    for program in ways if first_indented else ways[1:]:
        with contextlib.suppress(SyntaxError, ValueError):
            compile(program, "<candidate>", "exec")
            return program
    return code


def run_candidate(connection: socket.socket) -> None:
    """Load the candidate, then answer calls until the tests' process ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 256)
    peer = Peer(connection, {**_OPERATIONS, "attr": getattr})
    prompt, code, entry_point = peer.receive()
    module = _module("candidate")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            peer.classes = _run_prompt(prompt, module)
            program = _assembled(prompt, code, entry_point)
            exec(compile(program, "<candidate>", "exec"), module.__dict__)
            peer.classes = {
                name: module.__dict__.get(name, kind) for name, kind in peer.classes.items()
            }
            handle = peer.add_object(eval(entry_point, module.__dict__))
    except BaseException as error:
        peer.send(["failed", type(error).__name__])
        return
    peer.send(["loaded", handle])
    with contextlib.suppress(EOFError):
        while True:
            peer.send(peer.answer(peer.receive()))


def run_tests(job: Mapping[str, Any], connection: socket.socket) -> tuple[str, str]:
    """Run the tests against the candidate; returns the verdict and its reason."""
    peer = Peer(connection, _OPERATIONS)
    module = _module("tests")
    peer.classes = _run_prompt(job["prompt"], module)
    try:
        exec(compile(job["test"], "<test>", "exec"), module.__dict__)
        check = module.__dict__["check"]
    except KeyError:
        return "invalid", "the test defines no function check"
    except BaseException as error:
        return "invalid", f"the test cannot be executed: {error!r}"
    try:
        peer.send([job["prompt"], job["candidate"], job["entry_point"]])
        state, handle = peer.receive()
    except BaseException:
        return "failed", "the candidate's process ended"
    if state != "loaded" or type(handle) is not int:
        return "failed", f"the candidate does not load: {handle}"
    candidate = Remote(peer, handle, job["entry_point"])
    module.__dict__[job["entry_point"]] = candidate
    try:
        check(candidate)
    except BaseException as error:
        return "failed", type(error).__name__
    return ("failed", "the candidate's process ended") if peer.is_gone else ("passed", "")


def main() -> None:
    """Read a job, test its candidate, and write the verdict after the job's token."""
    sys.set_int_max_str_digits(0)
    ours, theirs = socket.socketpair()
    # Forked before the job is read, so that the candidate's memory holds neither the tests nor the
    # token that makes a verdict genuine.
    if os.fork() == 0:
        try:
            ours.close()
            run_candidate(theirs)
        finally:
            os._exit(0)
    theirs.close()
    with contextlib.suppress(AttributeError, OSError):
        # After this call the candidate can neither trace this process nor open its files in /proc.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = json.load(sys.stdin)
    if list(sys.version_info[:2]) == job["python"]:
        sys.path += job["path"]
    verdicts = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    print(job["token"], "started", file=verdicts, flush=True)
    verdict, reason = run_tests(job, ours)
    print(job["token"], verdict, json.dumps(reason[:500]), file=verdicts, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
