"""The URL and the options of a connection to the database.

`engine.py` uses this module for every connection: several hosts, secrets in the query, and
timeouts, so that both sides notice a host that vanished. Must not: connect, or show a password in
an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, make_url

from pipeline.contract.errors import ConfigError
from pipeline.contract.url_secrets import hide_passwords, is_secret_parameter
from pipeline.settings.keepalive import Keepalive

_SEVERAL_HOSTS = re.compile(
    r"(?P<head>[a-z0-9+]+://(?:[^/?#]*@)?)(?P<hosts>[^/?#@]*,[^/?#@]*)"
    r"(?P<path>/[^?]*)?(?:\?(?P<query>.*))?"
)


def read_url(url: str) -> tuple[URL, dict[str, str]]:
    """Return a URL and, apart from it, the secrets of its query: an engine's `repr` shows the URL.

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


def network_options(url: URL, keepalive: Keepalive) -> dict[str, str | int]:
    """Return libpq's options for hosts that vanish and for failovers; those of the URL prevail."""
    options: dict[str, str | int] = {
        "keepalives_idle": keepalive.idle_s,
        "keepalives_interval": keepalive.interval_s,
        "keepalives_count": keepalive.count,
        "tcp_user_timeout": keepalive.unsent_ms,
        "target_session_attrs": "read-write",
    }
    return {name: value for name, value in options.items() if name not in url.query}


def bound_session(keepalive: Keepalive) -> Callable[[Any, Any], None]:
    """Return a listener of new connections: their server notices soon that our host vanished.

    Otherwise the session of a vanished host would hold its locks for hours. The parameters are set
    by a statement, because pgbouncer refuses them when a client connects.
    """
    values = {
        "tcp_keepalives_idle": keepalive.idle_s,
        "tcp_keepalives_interval": keepalive.interval_s,
        "tcp_keepalives_count": keepalive.count,
        "tcp_user_timeout": keepalive.unsent_ms,
    }
    settings = ", ".join(f"set_config('{name}', '{n}', false)" for name, n in values.items())
    statement = f"SELECT {settings}"

    def on_connect(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)
        connection.commit()

    return on_connect
