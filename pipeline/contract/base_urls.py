"""Base URLs of model endpoints: parsing, comparison, and the check that a worker may call them.

Used by runs, settings, workers and the command line, so that all of them judge a URL alike. Must
not: hold a key, or look anything up in the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit

from pipeline.contract.url_secrets import hide_passwords, passwords_in

#: Characters that make URL parsers disagree about the host.
_AMBIGUOUS = re.compile(r"[\s\\@]")


def base_url_of(value: Any) -> Any:
    """Return one base URL as a string, several as a tuple, and none as None.

    Several URLs are given as a list, as `a,b` or as JSON. Duplicates are dropped; the order stays.
    """
    if isinstance(value, str):
        text = value.strip()
        value = json.loads(text) if text.startswith("[") else text.split(",")
    if not isinstance(value, list | tuple):
        return value
    given = cast("Sequence[Any]", value)
    stripped = (url.strip() if isinstance(url, str) else url for url in given)
    urls = tuple(url for url in dict.fromkeys(stripped) if url != "")
    return urls if len(urls) > 1 else urls[0] if urls else None


def urls_of(base_url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the URLs in a value of `base_url_of`; none for None."""
    if base_url is None:
        return ()
    return (base_url,) if isinstance(base_url, str) else base_url


def same_endpoint(left: str, right: str | None) -> bool:
    """Return whether two base URLs name the same endpoint, with whatever credentials.

    Raises:
        ValueError: One of the URLs cannot be parsed.
    """
    return right is not None and _normalised(left) == _normalised(right)


def may_call(url: str, known: Iterable[str]) -> bool:
    """Return whether a worker with these known endpoints may call a URL; loopback is allowed.

    Raises:
        ValueError: The URL cannot be parsed.
    """
    return is_loopback(url) or any(same_endpoint(url, allowed) for allowed in known)


def without_credentials(url: str) -> str:
    """Return a URL without the user, the password and the secret parameters that it may carry.

    Raises:
        ValueError: The URL cannot be parsed.
    """
    parts = urlsplit(url)
    return hide_passwords(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


def carries_credentials(url: str) -> bool:
    """Return whether a URL carries a user, a password or a secret parameter.

    Raises:
        ValueError: The URL cannot be parsed.
    """
    return "@" in urlsplit(url).netloc or bool(passwords_in(url))


@lru_cache(maxsize=64)
def is_loopback(url: str) -> bool:
    """Return whether every URL parser finds this machine in a URL."""
    import ipaddress

    if _AMBIGUOUS.search(url):
        return False
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _normalised(url: str) -> tuple[str, str, str]:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts.scheme, host.lower(), parts.path.rstrip("/")
