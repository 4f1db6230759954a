"""Program inside a sandbox: serves a port from a Unix socket while it runs a command.

`CommandAgent` passes the text of this file to the sandbox's Python, with the socket's path, the
port and the command as arguments. The program exits as the command does. Must not: import anything
but the standard library, or forward to another address.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

_CHUNK_BYTES = 65536
_STACK_BYTES = 256 * 1024


def run(socket_path: str, port: int, command: list[str]) -> int:
    """Forward while the command runs; return its exit code, 127 if it cannot be started."""
    threading.stack_size(_STACK_BYTES)
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=_serve, args=(listener, socket_path), daemon=True).start()
    try:
        code = subprocess.call(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return code if code >= 0 else 128 - code


def _serve(listener: socket.socket, socket_path: str) -> None:
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(socket_path)
        except OSError:
            client.close()
            continue
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
