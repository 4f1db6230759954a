"""`SandboxTool`: the base of the tools that work in the sandbox of their trajectory.

Inherited by `bash_executor`, `file_editor` and `search`. All of them share one sandbox, which the
last one closes. Must not: open a sandbox before a call needs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.core.base_tool import BaseAgenticTool
from workers.core.tool_schemas import OpenAIFunctionToolSchema
from workers.sandbox.shared import SHARED, SandboxSettings


class SandboxTool(BaseAgenticTool):
    """A tool that uses the sandbox which the settings `SANDBOX_OPTIONS` describe."""

    def __init__(self, config: Mapping[str, Any] | None, schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, schema)
        self.sandbox_settings = SandboxSettings.from_config(self.config)

    async def release_instance(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the trajectory's state, and close its sandbox if no other tool uses it."""
        await super().release_instance(instance_id)
        await SHARED.leave(self, instance_id, self.sandbox_settings)
