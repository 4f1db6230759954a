"""The options of `run` and `submit`, and the run's configuration made from them.

These commands and `submission.py` use it. Must not: connect to a server.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from pipeline.contract.agentcore import AGENT
from pipeline.contract.errors import InputError
from pipeline.contract.run import RunConfig
from pipeline.contract.url_secrets import hide_passwords
from pipeline.settings.sections import AgentCoreSettings
from rollout.remote_target import E_TARGET, remote_target

E_OPTION = "E106"


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """A dataset and the run's configuration; None means the default of a run."""

    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET", help=".jsonl or .parquet file, saved dataset, or hf:NAME[:CONFIG]."
        ),
    ]
    run: Annotated[
        str | None, typer.Option(metavar="SLUG", help="The run's name (default: a generated one).")
    ] = None
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Default: single_turn.")] = None
    tools: Annotated[
        str | None, typer.Option(metavar="A,B", help="The agent's tools, separated by commas.")
    ] = None
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Default: exact_match; `none` (default of coding, swe, agentcore): the verdict of "
            "the agent.",
        ),
    ] = None
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="Rollouts of each prompt (default: 1).")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None
    prompt_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Column of the prompt (default: prompt, question, …)."),
    ] = None
    answer_field: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="Column of the gold answer (default: answer, solution, …)."
        ),
    ] = None
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="`agentcore`: sessions of a remote agent execute the attempts."
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(metavar="URL|ARN", help="The remote agent: a runtime ARN or a container."),
    ] = None
    model: Annotated[str | None, typer.Option(help="Model name sent with each call.")] = None
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="OpenAI-compatible endpoint, with its /v1; more than once: replicas.",
        ),
    ] = None
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="Executions that count, per rollout (default: 3).")
    ] = None
    max_error_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of failed rollouts above which the run pauses and fails (default: 0.5 at "
            "its end, or all of its first ones; 1: never).",
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Turns and tool results of a trajectory (default: the agent's)."),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one model response (default: 512).")
    ] = None
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Wall clock of one attempt's agent (default: 600)."),
    ] = None
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; a rollout adds its index in the group.")
    ] = None
    purpose: Annotated[str | None, typer.Option(help="train or eval (default: train).")] = None
    queue: Annotated[
        str | None, typer.Option(help="Queue of the workers that may run it (default: rollouts).")
    ] = None
    split: Annotated[str | None, typer.Option(help="Split of the dataset.")] = None
    epoch: Annotated[
        int, typer.Option(min=0, help="Another epoch enqueues the same rows once more.")
    ] = 0
    dataset_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Dataset name (default: the file's name).")
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Put rows that cannot be read aside and go on.")
    ] = False
    on_error: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=ACTION", help="Change a row of the error table: retry, fail, …"
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Any field of a run, e.g. limits.max_steps=20."),
    ] = None


def run_config(
    options: SubmitOptions,
    defaults: Mapping[str, Any],
    *,
    agentcore: AgentCoreSettings | None = None,
) -> RunConfig:
    """Return the run's configuration.

    Args:
        options: The options of the command.
        defaults: The settings' values for all runs; options override them.
        agentcore: Where results of remote agents go.

    Raises:
        InputError: An option is invalid.
        ConfigError: A remote agent is named, and the settings name no place for its results.
    """
    values: dict[str, Any] = copy.deepcopy(dict(defaults))
    for name in ("agent", "model", "base_url", "n", "max_attempts", "max_error_rate", "purpose"):
        _set_path(values, name, getattr(options, name))
    _set_path(values, "queue", options.queue)
    if options.tools is not None:
        values["tools"] = [name.strip() for name in options.tools.split(",") if name.strip()]
    if options.reward is not None:
        values["reward"] = None if options.reward == "none" else options.reward
    for name in ("max_steps", "max_tokens", "timeout_s"):
        _set_path(values, f"limits.{name}", getattr(options, name))
    for name in ("temperature", "seed"):
        _set_path(values, f"sampling.{name}", getattr(options, name))
    if _is_remote(options):
        target = remote_target(options.target, agentcore or AgentCoreSettings())
        values |= {"agent": AGENT, "agentcore": target}
        if options.reward is None:
            values["reward"] = None
    for assignment in options.on_error or ():
        error_class, action = _split_assignment(assignment, "--on-error CLASS=ACTION")
        _set_path(values, f"on_error.{error_class}", action)
    for assignment in options.set or ():
        field, value = _split_assignment(assignment, "--set FIELD=VALUE")
        _set_path(values, field, _parsed(value))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _bad_option(error) from None  # pydantic shows the input, which may be a secret


def _is_remote(options: SubmitOptions) -> bool:
    if options.executor not in (None, "local", AGENT):
        raise InputError(
            f"There is no executor {options.executor!r}.",
            remedy="Known: local, agentcore.",
            code=E_OPTION,
        )
    is_remote = options.executor == AGENT
    if options.target is not None and not is_remote:
        raise InputError(
            "--target names a remote agent.", remedy="Add --executor agentcore.", code=E_TARGET
        )
    return is_remote


def _split_assignment(assignment: str, form: str) -> tuple[str, str]:
    left, equals, right = assignment.partition("=")
    if not equals:
        option = form.partition(" ")[0]
        raise InputError(
            f"{option} {assignment} has no `=`.", remedy=f"Write it as {form}.", code=E_OPTION
        )
    return left, right


def _set_path(values: dict[str, Any], path: str, value: Any) -> None:
    if value is None:
        return
    *sections, name = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"{section} has no field {name}.", code=E_OPTION)
    values[name] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bad_option(error: ValidationError) -> InputError:
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"] if part != "[key]"]
    if first["type"] == "extra_forbidden":
        model: Any = RunConfig
        for part in place[:-1]:
            model = model.model_fields[part].annotation
        near = difflib.get_close_matches(place[-1], model.model_fields, n=1)
        known = f"Known: {', '.join(model.model_fields)}."
        return InputError(
            f"A run has no field {'.'.join(place)}.",
            remedy=f"Did you mean {near[0]}?" if near else known,
            code=E_OPTION,
        )
    message = first["msg"].removeprefix("Value error, ")
    if not place:
        return InputError(f"These options do not go together: {message}.", code=E_OPTION)
    given = hide_passwords(repr(first.get("input")))
    return InputError(f"{'.'.join(place)} cannot be {given}: {message}.", code=E_OPTION)
