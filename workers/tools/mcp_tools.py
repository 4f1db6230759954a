"""The tools of an MCP server as tools of an agent.

`async with mcp_tools(command="server") as tools: agent.set_tools(tools)`. Needs the package `mcp`
(extra `mcp`). Must not: pass this process's environment to the server, which gets only the default
variables of MCP clients and those of `env`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.core.base_tool import BaseAgenticTool
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

MAX_TOOL_PAGES = 100


class MCPTool(BaseAgenticTool):
    """One tool of an MCP server, usable while its connection is open.

    Args:
        client: The open connection.
        tool: The server's description of the tool.
        name: Name for the model.
        call_timeout_s: Longest wait for the server's answer.
    """

    def __init__(self, client: Client, tool: Tool, name: str, call_timeout_s: float) -> None:
        schema = create_openai_tool_schema(
            name, tool.description or "", {"type": "object", **tool.input_schema}
        )
        super().__init__(tool_schema=schema)
        self._client = client
        self._server_name = tool.name
        self._call_timeout_s = call_timeout_s

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Call the tool on the server; an error of the server is a result with success=False."""
        result = await self._client.call_tool(
            self._server_name, parameters, read_timeout_seconds=self._call_timeout_s
        )
        text = _text_of(result)
        if result.is_error:
            return ToolResult(success=False, error=text or "the MCP server reported an error")
        structured = result.structured_content
        return ToolResult(
            success=True,
            result=text,
            metrics={} if structured is None else {"structured_content": structured},
        )


@asynccontextmanager
async def mcp_tools(
    command: str | None = None,
    args: Sequence[str] = (),
    *,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | PathLike[str] | None = None,
    name_prefix: str = "",
    call_timeout_s: float = 60.0,
) -> AsyncIterator[dict[str, MCPTool]]:
    """Open an MCP server's tools: tool name to tool.

    Args:
        command: Executable of a server on stdin and stdout, which runs inside the context.
        args: Its arguments.
        url: Instead of a command, the address of a running server (streamable HTTP).
        env: Variables for the command beside the default ones.
        cwd: The command's working directory.
        name_prefix: Prefix of each tool's name, for servers with tools of equal names.
        call_timeout_s: Longest wait for the answer of one call.

    Raises:
        ValueError: Neither or both of command and url are given.
        ModuleNotFoundError: The package `mcp` is not installed.
    """
    if (command is None) == (url is None):
        raise ValueError("give either command (a server to start) or url (one that is running)")
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "MCP tools need the package mcp: pip install 'rollout-pipeline[mcp]'", name="mcp"
        ) from error
    parameters = StdioServerParameters(
        command=command or "",
        args=list(args),
        env=dict(env) if env is not None else None,
        cwd=Path(cwd) if cwd is not None else None,
    )
    # The default is sys.stderr at the import of mcp. In a notebook that is an object without a file
    # descriptor, and no process can write to it.
    server = url or stdio_client(parameters, errlog=sys.__stderr__)  # type: ignore[arg-type]
    async with Client(server, read_timeout_seconds=call_timeout_s) as client:
        tools = [
            MCPTool(client, tool, f"{name_prefix}{tool.name}", call_timeout_s)
            for tool in await _all_tools(client)
        ]
        yield {tool.name: tool for tool in tools}


async def _all_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(MAX_TOOL_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _text_of(result: CallToolResult) -> str:
    """Return the text parts, and for other parts their kind."""
    parts = []
    for part in result.content:
        text = getattr(part, "text", None)
        if text is None and (resource := getattr(part, "resource", None)) is not None:
            text = getattr(resource, "text", None)
        parts.append(text if text is not None else f"[{part.type}]")
    return "\n".join(parts)
