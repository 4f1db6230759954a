"""The published policy of a run: the version of its weights, and where they are served.

Written by the trainer client, carried by requests and by the command that tells workers of a new
version. Must not: hold the weights.
"""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pipeline.contract.base_urls import base_url_of, carries_credentials, urls_of
from pipeline.contract.errors import InputError

PolicyMode = Literal["keep", "abort", "pause"]

#: Largest version that the store keeps.
MAX_VERSION = 2**31 - 1

E_POLICY = "E123"


class Policy(BaseModel):
    """One publication of a run's policy; the one with the highest `serial` counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: UUID
    version: int = Field(ge=0, le=MAX_VERSION)
    serial: int = Field(ge=1, description="Number of the publication within the run.")
    mode: PolicyMode = Field(
        default="keep",
        description="`keep`: calls under way finish on the old weights; `abort`: they are repeated "
        "on the new ones; `pause`: new calls wait for the next publication.",
    )
    endpoints: tuple[str, ...] = Field(
        default=(), description="Base URLs that serve it; none: the run's own."
    )


#: The message that tells workers which policies are published.
POLICIES: TypeAdapter[list[Policy]] = TypeAdapter(list[Policy])


def check_publication(
    version: int, endpoints: str | tuple[str, ...] | list[str] | None, mode: str
) -> tuple[str, ...]:
    """Return the endpoints of a publication, checked.

    Raises:
        InputError: The version is negative or too large, an endpoint is no URL or carries
            credentials, or there is no such mode.
    """
    if not 0 <= version <= MAX_VERSION:
        raise _refused(f"{version} is no policy version.", f"Use 0 to {MAX_VERSION}.")
    if mode not in get_args(PolicyMode):
        raise _refused(f"There is no mode {mode!r}.", "Use keep, abort or pause.")
    try:
        urls = urls_of(base_url_of(endpoints))
        if not all(urlsplit(url).scheme in ("http", "https") for url in urls):
            raise ValueError
        is_secret = any(carries_credentials(url) for url in urls)
    except (ValueError, AttributeError):
        # The cause may show a password.
        raise _refused("An endpoint is no base URL.", "Use http://HOST:PORT/v1.") from None
    if is_secret:
        raise _refused(
            "An endpoint carries credentials.", "Keys and passwords are the worker's own settings."
        )
    return urls


def _refused(what: str, remedy: str) -> InputError:
    return InputError(what, remedy=remedy, code=E_POLICY)
