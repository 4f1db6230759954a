"""The agents of this worker's runs, each made once with its tools and shared by equal requests.

Held by the runtime, used on the event loop. Must not: run an agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pipeline.contract.errors import SandboxError
from pipeline.contract.messages import RolloutRequest
from pipeline.settings import Settings
from workers.core.base_agent import BaseAgent
from workers.core.registry import get_agent_class
from workers.core.tools_config import create_tools
from workers.process.option_checks import require_options
from workers.rewards.registry import get_reward
from workers.tools.mcp_servers import MCP_PREFIX, MCPServerError, MCPServers

#: A worker serves few runs at a time.
_MAX_AGENTS = 64


class AgentCache:
    """The agents, and the MCP servers of their tools.

    Args:
        settings: The worker's, with the MCP servers by name.
    """

    def __init__(self, settings: Settings) -> None:
        self._agents: dict[bytes, BaseAgent] = {}
        self._mcp = MCPServers(
            {name: server.arguments() for name, server in settings.worker.mcp.items()}
        )

    async def agent_for(self, request: RolloutRequest) -> BaseAgent:
        """Return the agent a request names, with its tools.

        Raises:
            ValueError: An unknown agent, tool or MCP server.
            SandboxError: An MCP server could not be opened.
            ContractError: An unknown reward, or an unknown option or one of a wrong type.
        """
        key = orjson.dumps(
            [
                request.run_id.hex,  # an agent reports its configuration's errors once for each run
                request.agent,
                request.agent_config,
                request.tools,
                request.tools_config,
                request.reward,
                request.reward_config,
                request.limits.max_steps,
                request.limits.max_tokens,
            ],
            option=orjson.OPT_SORT_KEYS,
        )
        remote = await self._remote_tools(request)
        agent = self._agents.get(key)
        if agent is None:
            if len(self._agents) >= _MAX_AGENTS:
                self._agents.clear()
            agent = self._agents[key] = _make_agent(request, remote)
        return agent

    async def close(self) -> None:
        """Close the MCP servers."""
        await self._mcp.close()

    async def _remote_tools(self, request: RolloutRequest) -> Mapping[str, Any]:
        names = [name.removeprefix(MCP_PREFIX) for name in request.tools if _is_remote(name)]
        try:
            return await self._mcp.tools(names)
        except MCPServerError as error:
            raise SandboxError(str(error), code="mcp_server") from error


def _is_remote(tool: str) -> bool:
    return tool.startswith(MCP_PREFIX)


def _make_agent(request: RolloutRequest, remote: Mapping[str, Any]) -> BaseAgent:
    if request.reward is not None:
        # Raises for an unknown reward before any model call is made.
        get_reward(request.reward)
    require_options(request)
    agent_class: Any = get_agent_class(request.agent)
    options: dict[str, Any] = {"max_tokens_per_step": request.limits.max_tokens}
    if request.limits.max_steps is not None:
        options["max_steps"] = request.limits.max_steps
    options |= request.agent_config
    agent: BaseAgent = agent_class(**options)
    if request.tools:
        asked = {name: request.tools_config.get(name) for name in request.tools}
        local = {name: config for name, config in asked.items() if not _is_remote(name)}
        if doubled := local.keys() & remote.keys():
            raise ValueError(
                f"A tool of an MCP server is named {min(doubled)!r}, as another tool of the run: "
                "give the server a name_prefix."
            )
        agent.set_tools({**create_tools(local, in_sandbox=True), **remote})
    return agent
