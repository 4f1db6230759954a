"""Reads the URL of the database: several hosts, and secrets in the query.

`engine.py` uses it for every connection. Must not: connect, or show a password in an error.
"""

from __future__ import annotations

import re

from sqlalchemy import URL, make_url

from pipeline.contract.errors import ConfigError
from pipeline.contract.url_secrets import hide_passwords, is_secret_parameter

_SEVERAL_HOSTS = re.compile(
    r"(?P<head>[a-z0-9+]+://(?:[^/?#]*@)?)(?P<hosts>[^/?#@]*,[^/?#@]*)"
    r"(?P<path>/[^?]*)?(?:\?(?P<query>.*))?"
)


def read_url(url: str) -> tuple[URL, dict[str, str]]:
    """Return a URL, and apart from it the secrets of its query: an engine's `repr` shows a query.

    Raises:
        ConfigError: The URL cannot be read.
    """
    if several := _SEVERAL_HOSTS.fullmatch(url):
        # SQLAlchemy reads several hosts from the query only; libpq reads them before the path too.
        hosts = [f"host={host}" for host in several["hosts"].split(",")]
        query = "&".join([*hosts, several["query"] or ""]).rstrip("&")
        url = f"{several['head']}{several['path'] or '/'}?{query}"
    try:
        parsed = make_url(url)
    except Exception:  # its text would show a part of the URL
        raise ConfigError(
            f"The database URL {hide_passwords(url)} cannot be read.",
            remedy="Write it as postgresql://user:password@host:5432/name, and percent-encode the "
            "password: %2F for /, %3F for ?, %23 for #, %40 for @.",
        ) from None
    secret = {name: str(text) for name, text in parsed.query.items() if is_secret_parameter(name)}
    return parsed.difference_update_query(secret), secret
