"""A Claude client for agents: the library's own, with its settings from the environment.

`ANTHROPIC_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_MODEL` are the defaults of the arguments.
Needs the `anthropic` SDK: pip install 'rollout-pipeline[anthropic]'.
"""

from __future__ import annotations

import os
from typing import Any

from workers.llm.anthropic_client import ANTHROPIC_BASE_URL, DEFAULT_MODEL
from workers.llm.anthropic_client import ClaudeAPIClient as LibraryClient


class ClaudeAPIClient(LibraryClient):
    """Claude as a model for agents: `await client.generate(messages, max_tokens=...)`.

    Args:
        api_key: Anthropic API key.
        base_url: Address of the API.
        model: Model of calls that name none.
        **options: As in the library's client.
    """

    def __init__(
        self,
        api_key: str | None = None,
        *,
        base_url: str | None = None,
        model: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            api_key or os.environ.get("ANTHROPIC_API_KEY"),
            base_url=base_url or os.environ.get("ANTHROPIC_BASE_URL") or ANTHROPIC_BASE_URL,
            model=model or os.environ.get("ANTHROPIC_MODEL") or DEFAULT_MODEL,
            **options,
        )
