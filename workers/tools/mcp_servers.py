"""MCP servers by name: each is opened at its first use and stays open for all trajectories.

Used by the worker, whose settings name the servers; a run names them as the tools `mcp:NAME`. After
a lost connection the next call opens it again. Must not: repeat a call.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from workers.core.base_tool import BaseAgenticTool
from workers.core.tool_schemas import ToolResult
from workers.tools.mcp_tools import MCPTool, mcp_tools

#: Prefix of the tool names of a run that stand for all tools of an MCP server.
MCP_PREFIX = "mcp:"

OPEN_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class MCPServerError(RuntimeError):
    """An MCP server would not start, or could not be reached."""


class MCPServers:
    """The MCP servers of a process; used on one event loop.

    Args:
        servers: Name to the arguments of `mcp_tools`.
        open_timeout_s: Longest time to start a server, or to connect to it.
    """

    def __init__(
        self, servers: Mapping[str, Mapping[str, Any]], *, open_timeout_s: float = OPEN_TIMEOUT_S
    ) -> None:
        self._servers = {
            name: _Server(name, arguments, open_timeout_s) for name, arguments in servers.items()
        }

    async def tools(self, names: Sequence[str]) -> dict[str, BaseAgenticTool]:
        """Return the tools of these servers by the names for the model.

        Raises:
            ValueError: No server has the name, or two tools have one name.
            MCPServerError: A server would not start, or could not be reached.
        """
        found: dict[str, BaseAgenticTool] = {}
        for name in names:
            if name not in self._servers:
                known = ", ".join(self._servers) or "none"
                raise ValueError(f"No MCP server is named {name!r} (worker.mcp). Known: {known}.")
            server = self._servers[name]
            tools = {tool: ServerTool(server, made) for tool, made in (await server.open()).items()}
            if doubled := found.keys() & tools.keys():
                raise ValueError(
                    f"Two MCP servers have a tool named {min(doubled)!r}: give {name!r} a "
                    "name_prefix."
                )
            found |= tools
        return found

    async def close(self) -> None:
        """Close all connections, which ends the servers that were started for them."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))


class ServerTool(BaseAgenticTool):
    """A tool of a server that may be opened again."""

    def __init__(self, server: _Server, tool: BaseAgenticTool) -> None:
        super().__init__(tool_schema=tool.get_openai_tool_schema())
        self._server = server

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Call the tool; a lost connection is an error, and the next call opens it again."""
        tools = await self._server.open()
        if self.name not in tools:
            return ToolResult(success=False, error="the MCP server has this tool no more")
        try:
            return await tools[self.name].execute_tool(instance_id, parameters)
        except Exception as error:
            if _is_lost(error):
                await self._server.close(tools)
            raise


class _Server:
    """One server and its connection."""

    def __init__(self, name: str, arguments: Mapping[str, Any], open_timeout_s: float) -> None:
        self._name = name
        self._arguments = arguments
        self._open_timeout_s = open_timeout_s
        self._lock = asyncio.Lock()
        self._tools: dict[str, MCPTool] | None = None
        self._closing = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None
        self._failure, self._failed_at = "", 0.0

    async def open(self) -> dict[str, MCPTool]:
        """Return the tools, after opening the connection if it is not open.

        Calls that wait while another one opens it share that one's failure.

        Raises:
            MCPServerError: It could not be opened.
        """
        asked_at = time.monotonic()
        async with self._lock:
            if self._tools is not None:
                return self._tools
            # Without this check, many rollouts would wait one after another for a server that does
            # not answer.
            if self._failed_at > asked_at:
                raise MCPServerError(self._failure)
            try:
                self._tools = await self._opened()
            except MCPServerError as error:
                self._failure, self._failed_at = str(error), time.monotonic()
                raise
            return self._tools

    async def close(self, tools: dict[str, MCPTool] | None = None) -> None:
        """Close the connection; given tools, only if they are still those of the connection."""
        async with self._lock:
            if self._connection is None or (tools is not None and tools is not self._tools):
                return
            self._closing.set()
            await asyncio.wait({self._connection})
            self._connection = self._tools = None

    async def _opened(self) -> dict[str, MCPTool]:
        # The import takes a second, which must not block the event loop. Where the package is
        # missing, `mcp_tools` says how to install it.
        with suppress(ModuleNotFoundError):
            await asyncio.to_thread(importlib.import_module, "mcp")
        opened: asyncio.Future[dict[str, MCPTool]] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._connection = asyncio.create_task(self._hold_open(opened))
        try:
            async with asyncio.timeout(self._open_timeout_s):
                return await opened
        except BaseException as error:
            self._connection.cancel()
            await asyncio.wait({self._connection})
            self._connection = None
            if not isinstance(error, Exception):
                raise
            reason = f"no answer within {self._open_timeout_s:g} s"
            if not isinstance(error, TimeoutError):
                reason = _first_cause(error)
            raise MCPServerError(
                f"The MCP server {self._name!r} could not be opened: {reason}"
            ) from error

    async def _hold_open(self, opened: asyncio.Future[dict[str, MCPTool]]) -> None:
        # The client's context must be left by the task that entered it.
        try:
            async with mcp_tools(**self._arguments) as tools:
                if not opened.done():
                    opened.set_result(tools)
                await self._closing.wait()
        except Exception as error:
            if opened.done():
                logger.warning("MCP server %s: %s", self._name, _first_cause(error))
            else:
                opened.set_exception(error)


def _is_lost(error: Exception) -> bool:
    """Say whether an error means that the connection cannot be used any more."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED
    return not isinstance(error, TimeoutError)


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
