"""Finds the passwords of URLs, and returns URLs without them.

Settings, adapters, the redactor and the command line use it, so that all of them agree on the part
of a URL that is secret. A value may hold several URLs (`amqp://…;amqp://…`, `http://…,http://…`),
and a URL several hosts. Must not: decide where a URL is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

MASK = "***"

_WORD_CHARS = 8

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
#: Names of query parameters whose values are secret. Names of key files are not among them.
_SECRET_NAME = re.compile(
    r"(?:pass(?:word|wd)?|pwd|secret|token|credentials?|sig(?:nature)?"
    r"|(?:api|access|account|shared|secret)[-_]?key|^key)$",
    re.IGNORECASE,
)
_PARAMETER = re.compile(r"(?<=[?&])([^=&#]+)=([^&#;,]*)")


def hide_passwords(value: str) -> str:
    """Return one or several URLs with `***` instead of every password."""
    return "".join(_hidden(piece) for piece in _pieces(value))


def hide_secret(secret: str) -> str:
    """Return the part of a secret that may be shown: a URL without its passwords, else `***`."""
    return hide_passwords(secret) if "://" in secret else MASK


def passwords_in(value: str) -> set[str]:
    """Return the passwords of one or several URLs, each as written and decoded."""
    found: set[str] = set()
    for piece in _pieces(value):
        start, end = _userinfo(piece)
        for secret in _passwords_of_hosts(piece[start:end]):
            found |= {secret, unquote(secret)}
        for name, secret in _PARAMETER.findall(piece):
            if is_secret_parameter(name):
                found |= {secret, unquote_plus(secret)}
    return found - {""}


def without_passwords(text: str, url: str) -> str:
    """Return a text, such as a driver's error about `url`, without the passwords of that URL."""
    for secret in sorted(passwords_in(url), key=len, reverse=True):
        # A short password may be part of a word that says what went wrong.
        edge = r"\b" if len(secret) < _WORD_CHARS and secret.isalnum() else ""
        text = re.sub(f"{edge}{re.escape(secret)}{edge}", MASK, text)
    return text


def is_secret_parameter(name: str) -> bool:
    """Return whether the value of a query parameter with this name is a secret."""
    return _SECRET_NAME.search(unquote(name)) is not None


def _pieces(value: str) -> Iterator[str]:
    """Cut a value before each `scheme://`; the separator stays at the end of the piece before."""
    starts = [found.start() for found in _SCHEME.finditer(value)]
    for start, end in zip([0, *starts], [*starts, len(value)], strict=True):
        yield value[start:end]


def _userinfo(piece: str) -> tuple[int, int]:
    """Return where user and password stand, up to the last `@` that can end them.

    A password that should be percent-encoded may hold `/`, `?`, `#` or `@`, and each of several
    hosts may have its own password. So this takes too much rather than too little.
    """
    scheme = _SCHEME.match(piece)
    start = scheme.end() if scheme else 0
    query = piece.find("?", start)
    end = piece.rfind("@", start, query if query >= 0 else len(piece))
    if end < 0 and not _ends_in_ports(re.split(r"[/?#]", piece[start:], maxsplit=1)[0]):
        end = piece.rfind("@", start)
    return start, max(start, end)


def _ends_in_ports(hosts: str) -> bool:
    """Return whether all colons of hosts are followed by a port, or stand in an IPv6 address."""
    hosts = re.sub(r"\[[^]]*\]", "", hosts)
    return all(re.fullmatch(r"[^:]*(?::\d*)?", host) for host in hosts.split(","))


def _passwords_of_hosts(userinfo: str) -> Iterator[str]:
    """Yield all that may be a password: the rest after the first colon, and that of each host."""
    for part in (userinfo, *re.split(r"@[^@,;]*[,;]", userinfo)):
        yield part.partition(":")[2]


def _hidden(piece: str) -> str:
    start, end = _userinfo(piece)
    user, colon, password = piece[start:end].partition(":")
    shown = f"{user}:{MASK}" if colon and password else piece[start:end]
    return piece[:start] + shown + _PARAMETER.sub(_hidden_parameter, piece[end:])


def _hidden_parameter(found: re.Match[str]) -> str:
    return f"{found[1]}={MASK}" if is_secret_parameter(found[1]) else found[0]
