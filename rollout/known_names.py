"""Checks that a run's agents, tools and rewards exist here and accept their options.

`run` rejects names that its own workers would not know; `submit` can only warn. Both reject invalid
options of known names. The check imports the plug-ins, as a worker does.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from pipeline.contract.errors import ContractError, InputError
from pipeline.contract.run import RunConfig
from rollout.run_options import E_OPTION
from workers.core.registry import list_agents
from workers.core.tool_registry import get_global_tool_registry
from workers.process.option_checks import require_options
from workers.process.plugins import load_plugins
from workers.rewards.registry import list_rewards
from workers.tools.mcp_servers import MCP_PREFIX

E_UNKNOWN_NAME = "E107"


def find_unknown(
    config: RunConfig, *, plugins: Sequence[str], mcp_servers: Collection[str] = ()
) -> list[str]:
    """Return a sentence for each name that is not registered here.

    Args:
        config: The run's.
        plugins: Modules that register names.
        mcp_servers: Names of the MCP servers in the settings.

    Raises:
        ConfigError: A plug-in cannot be loaded.
        InputError: A name that is registered here does not accept an option.
    """
    load_plugins(plugins)
    found: list[str] = []
    servers = [f"{MCP_PREFIX}{name}" for name in mcp_servers]
    tools = [*get_global_tool_registry().get_tool_names(), *servers]
    for kind, name, known in (
        ("agent", config.agent if config.agentcore is None else None, list_agents()),
        *(("tool", name, tools) for name in config.tools),
        ("reward", config.reward, list_rewards()),
    ):
        if name is not None and name not in known:
            found.append(_sentence(kind, name, known))
    try:
        require_options(config)
    except ContractError as error:
        raise InputError(str(error), code=E_OPTION) from None
    return found


def require_known(
    config: RunConfig, *, plugins: Sequence[str], mcp_servers: Collection[str] = ()
) -> None:
    """Check every name of a run, and the options.

    Raises:
        InputError: A name is not registered here, or does not accept an option.
    """
    unknown = find_unknown(config, plugins=plugins, mcp_servers=mcp_servers)
    if unknown:
        raise InputError(
            unknown[0],
            remedy="If it is your own, name its module: --plugin my_agents.py, or its MCP server "
            "in the settings: worker.mcp",
            code=E_UNKNOWN_NAME,
        )


def _sentence(kind: str, name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(known)}."
    return f"No {kind} is named {name!r}. {hint}"
