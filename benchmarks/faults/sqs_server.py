"""A private stand-in for SQS and S3 (moto) as a process, which can refuse calls or hang.

The fault deployments and the test fixtures start it. Like SQS it never loses a message by itself:
an outage leaves the queues as they are. Must not: listen on anything but loopback.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import ROOT

_TIMEOUT_S = 30.0
#: A request to this path with an error code as its body makes every later call end with that error.
_REFUSE = "/_refuse"
#: A request to this path empties all queues.
_LOSE = "/_lose"

#: The error of a service that is down.
UNAVAILABLE = "ServiceUnavailable"

#: Seconds after which SQS delivers an unacknowledged message again, in processes of a deployment:
#: a minute, otherwise.
_VISIBILITY_S = 5


def shorten_visibility() -> None:
    """Let this process make its queues with a short visibility timeout."""
    from pipeline.queue import broker

    broker._VISIBILITY_S = _VISIBILITY_S


class SqsServer:
    """The stand-in as a broker for fault injection.

    An outage is an SQS that answers every call with an error. Its restart finds all messages.
    """

    name = "sqs"
    url = "sqs://testing:testing@"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._popen: subprocess.Popen[str] | None = None
        self.endpoint = ""

    def start(self) -> None:
        """Start the stand-in, and wait until it serves; end an outage."""
        if self._popen is not None:
            self.refuse("")
            return
        with (self._folder / "sqs.log").open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.faults.sqs_server"],
                cwd=ROOT,
                # Without the caller's settings for AWS, which may name other places.
                env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._popen.stdout is not None
        port = self._popen.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"moto did not start:\n{(self._folder / 'sqs.log').read_text()}")
        self.endpoint = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        """Begin an outage: every call ends with an error until `start`."""
        self.refuse(UNAVAILABLE)

    def refuse(self, code: str) -> None:
        """End every further call with an AWS error of this code; none with an empty code."""
        self._control(_REFUSE, code)

    def forget(self) -> None:
        """Do nothing, because SQS keeps its messages during an outage."""

    def lose_messages(self) -> None:
        """Empty all queues; PurgeQueue does so too, but only once a minute."""
        self._control(_LOSE, "")

    def pause(self) -> None:
        """Stop the process, so that the broker does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the stopped process."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the stand-in."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.communicate(timeout=20)

    def _control(self, path: str, text: str) -> None:
        request = urllib.request.Request(self.endpoint + path, data=text.encode())
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            pass

    def _signal(self, number: signal.Signals) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)


#: A WSGI application.
Application = Callable[..., Iterable[bytes]]


class _Service:
    """The WSGI application: moto behind a switch, one call at a time.

    Moto rewrites lists of messages without a lock; two calls at once may lose a message or deliver
    it twice. Moto's own server looks through its folders for the service of each call.
    """

    def __init__(self, sqs: Application, s3: Application, lock: threading.RLock) -> None:
        self._sqs, self._s3 = sqs, s3
        self._lock = lock
        self._code = ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] in (_REFUSE, _LOSE):
            text = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode()
            if environ["PATH_INFO"] == _REFUSE:
                self._code = text
            else:
                self._empty_queues()
            start_response("200 OK", [])
            return [b""]
        if self._code:
            status = "503 Refused" if self._code == UNAVAILABLE else "400 Refused"
            start_response(status, [("Content-Type", "application/x-amz-json-1.0")])
            return [json.dumps({"__type": self._code, "message": "A fault."}).encode()]
        target = environ.get("HTTP_X_AMZ_TARGET", "")  # S3 has no such header
        if target.endswith("ReceiveMessage"):
            return self._sqs(environ, start_response)
        moto = self._sqs if target else self._s3
        with self._lock:
            return list(moto(environ, start_response))

    def _empty_queues(self) -> None:
        from moto.sqs.models import sqs_backends

        with self._lock:
            for account in sqs_backends.values():
                for backend in account.values():
                    for queue in backend.queues.values():
                        queue._messages.clear()


def _receive_alone(lock: threading.RLock) -> None:
    """Let moto's long polling hold the lock only while it looks for messages."""
    from moto.sqs.models import SQSBackend

    backend: Any = SQSBackend
    look = backend.receive_message

    def receive(
        self: Any, queue_name: str, count: int, wait_s: int, visibility_s: int, names: Any = None
    ) -> Any:
        until = time.monotonic() + wait_s
        while True:
            with lock:
                found = look(self, queue_name, count, 0, visibility_s, names)
            left_s = until - time.monotonic()
            if found or left_s <= 0:
                return found
            self.get_queue(queue_name).wait_for_messages(min(left_s, 0.2))

    backend.receive_message = receive


def main() -> None:
    from moto.server import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def log_request(self, *_: Any) -> None:
            pass

    lock = threading.RLock()
    _receive_alone(lock)
    service = _Service(create_backend_app("sqs"), create_backend_app("s3"), lock)
    server = make_server("127.0.0.1", 0, service, threaded=True, request_handler=Handler)
    print(server.server_port, flush=True)
    # The end of the input is the end of the process that started this one.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
