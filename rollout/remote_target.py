"""The remote agent of a run: its target with the settings that are stored with the run.

`run_options.py` uses it. Must not: connect to the agent.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.base_urls import carries_credentials
from pipeline.contract.errors import ConfigError, InputError
from pipeline.contract.url_secrets import hide_passwords
from pipeline.settings.sections import AgentCoreSettings

E_TARGET = "E126"
E_NO_RESULTS = "E127"

_STORED_FIELDS = ("results_bucket", "session_timeout_s", "payload_style")


def remote_target(target: str | None, settings: AgentCoreSettings) -> dict[str, Any]:
    """Return the field `agentcore` of a run's configuration.

    Args:
        target: The URL or ARN of the agent, from the command's options.
        settings: Where the agent puts its results.

    Raises:
        InputError: No target is named, or it is neither a URL nor an ARN.
        ConfigError: The settings have no place for the results, or one that cannot be stored.
    """
    if target is None:
        raise InputError(
            "The executor agentcore needs a target.",
            remedy="Name the agent: --target ARN, or --target http://HOST:8080",
            code=E_TARGET,
        )
    if not settings.results_bucket:
        raise ConfigError(
            "No bucket for the results of remote agents is set.",
            remedy="Set ROLLOUT_AGENTCORE__RESULTS_BUCKET, or agentcore.results_bucket.",
            code=E_NO_RESULTS,
        )
    if settings.payload_style == "training" and not settings.results_queue_url:
        raise ConfigError(
            "The payload style `training` announces results on SQS, and no queue is set.",
            remedy="Set ROLLOUT_AGENTCORE__RESULTS_QUEUE_URL, or another agentcore.payload_style.",
            code=E_NO_RESULTS,
        )
    fields = {name: getattr(settings, name) for name in _STORED_FIELDS}
    queue = settings.results_queue_url
    queue_url = queue.get_secret_value() if queue else None
    # The run is stored and shown, and the app gets the URL in its payload.
    if queue_url and carries_credentials(queue_url):
        raise ConfigError(
            "The URL of the queue of results carries credentials.",
            why="Runs are stored and shown, and the URL is sent to the agent.",
            remedy="Name it without them; access to the queue comes from the AWS credentials.",
            code=E_NO_RESULTS,
        )
    try:
        return AgentCoreTarget(target=target, results_queue_url=queue_url, **fields).model_dump()
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(
            f"The target {hide_passwords(target)} cannot be used: {reason}.",
            remedy="Name an http(s) URL, or arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/ID.",
            code=E_TARGET,
        ) from None
