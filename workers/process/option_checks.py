"""Checks the options of a run for its agent, tools and reward against those registered here.

Called by the worker before an attempt calls a model, and by `rollout run` and `submit` before rows
are enqueued. Must not: make an agent or a tool, or reject a name that is not registered here.
"""

from __future__ import annotations

import difflib

from pipeline.contract.errors import ContractError
from pipeline.contract.run import AttemptSpec
from workers.core.options import OptionError
from workers.core.registry import check_agent_options, list_agents
from workers.core.tool_registry import get_global_tool_registry
from workers.rewards.registry import get_reward, list_rewards
from workers.tools.mcp_servers import MCP_PREFIX


def require_options(spec: AttemptSpec) -> None:
    """Check every option against those of its agent, tool or reward.

    Raises:
        ContractError: An option is unknown or of a wrong type; code `agent_option`, `tool_option`
            or `reward_option`.
    """
    if spec.agent in list_agents():
        try:
            check_agent_options(spec.agent, spec.agent_config)
        except OptionError as error:
            raise ContractError(str(error), code="agent_option") from None
    try:
        _require_tool_options(spec)
    except OptionError as error:
        raise ContractError(str(error), code="tool_option") from None
    if spec.reward is None and spec.reward_config:
        raise ContractError("The run has a reward_config and no reward.", code="reward_option")
    if spec.reward in list_rewards():
        get_reward(spec.reward or "").check_config(spec.reward_config)


def _require_tool_options(spec: AttemptSpec) -> None:
    registry = get_global_tool_registry()
    known = registry.get_tool_names()
    for name, config in spec.tools_config.items():
        if name not in spec.tools:
            near = difflib.get_close_matches(name, spec.tools, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Name it with --tools."
            raise OptionError(f"tools_config is for {name!r}, no tool of this run. {hint}")
        if name in known:
            registry.check_config(name, config)
        elif name.startswith(MCP_PREFIX) and config:
            raise OptionError(f"Tool {name!r} takes no options: the worker's settings have them.")
