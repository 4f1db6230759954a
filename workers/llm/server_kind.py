"""The kinds of model servers: token ids are requested only from kinds that can return them.

A plain OpenAI-compatible server may reject a request with fields that it does not know. The runtime
keeps one `ServerKinds` per worker process; clients call it before their first call. Must not: send
a key to another address, or fail a call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from pipeline.contract.base_urls import without_credentials
from workers.llm.token_capture import ServerKind

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MOST_BYTES = 2**20
#: An endpoint that did not answer is asked again after this time.
_ASK_AGAIN_S = 30.0


class ServerKinds:
    """The kinds of the endpoints that this process calls; each endpoint is asked once.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, ServerKind] = {}
        self._failed_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[ServerKind | None]] = {}

    async def find(self, base_url: str, api_key: str = "") -> ServerKind | None:
        """Return the kind of an endpoint; None while it does not answer."""
        if (known := self._known.get(base_url)) is not None:
            return known
        if self._clock() - self._failed_at.get(base_url, float("-inf")) < _ASK_AGAIN_S:
            return None
        # Hundreds of attempts begin at once; all wait for one answer.
        task = self._asking.get(base_url)
        if task is None:
            task = self._asking[base_url] = asyncio.create_task(self._ask(base_url, api_key))
        return await asyncio.shield(task)

    async def _ask(self, base_url: str, api_key: str) -> ServerKind | None:
        shown = without_credentials(base_url)
        try:
            kind = await ask_kind(base_url, api_key)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failed_at[base_url] = self._clock()
            log.warning("The kind of server at %s is unknown: %s", shown, error or type(error))
            return None
        finally:
            del self._asking[base_url]
        self._known[base_url] = kind
        log.info("The server at %s is of kind %s.", shown, kind)
        return kind


async def ask_kind(base_url: str, api_key: str = "") -> ServerKind:
    """Ask a server at its root, which is the base URL without `/v1`.

    Raises:
        aiohttp.ClientError: The server does not answer, or is not ready.
        TimeoutError: The server does not answer in time.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        if await _json_at(session, f"{root}/get_server_info"):
            return "sglang"
        return "vllm" if "version" in await _json_at(session, f"{root}/version") else "openai"


async def _json_at(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    """Return the JSON object at a URL; empty if there is none."""
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status >= 500 and answer.status != 501:
            answer.raise_for_status()
        if answer.status != 200:
            return {}
        data = await answer.content.read(_MOST_BYTES)
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
