"""`AgenticRollout`: an agent, its tools and a model's client, run over one prompt or many.

The main class of the library, standalone or as a rollout worker of a verl trainer. Reads the
environment variables when an object is made. Must not: import `pipeline`, or give a failed
trajectory a reward.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from workers.core.base_agent import BaseAgent
from workers.core.interaction import create_interactions
from workers.core.registry import check_agent_options, get_agent_class
from workers.core.sync_call import call_sync_or_async
from workers.core.trajectory import Trajectory
from workers.core.trajectory_files import write_trajectories

logger = logging.getLogger(__name__)

DEFAULT_SAVE_PATH = "./trajectories"
DEFAULT_OPENAI_MODEL = "gpt-4o-mini"  # where only OPENAI_API_KEY is set
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def _saves_by_default() -> bool:
    value = os.environ.get("AGENTIC_SAVE_TRAJECTORIES", "").strip().lower()
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise ValueError(f"AGENTIC_SAVE_TRAJECTORIES is {value!r}; set it to true or false")


@dataclass
class AgenticRolloutConfig:
    """The configuration of a rollout.

    Attributes:
        agent_type: Name of a registered agent.
        max_steps: Most steps of a trajectory.
        max_tokens_per_step: Most tokens sampled by one model call.
        temperature: Sampling temperature.
        tools_config: Tool name to its settings, such as `{"calculator": {"precision": 10}}`.
        interactions_config: Interaction name to object or class, see `workers.core.interaction`.
        agent_config: Further options of the agent, such as `{"native_tools": True}`.
        batch_size: Number of finished trajectories that are written to disk together.
        concurrent_requests: Most concurrent trajectories, and most concurrent model calls.
        include_trajectory_in_output: Whether `generate_sequences` returns whole trajectories, too.
        save_trajectories: Whether trajectories are written as JSON files; the default is the value
            of `AGENTIC_SAVE_TRAJECTORIES`.
        trajectory_save_path: Directory for them; `./trajectories` when None.
    """

    agent_type: str = "react"
    max_steps: int = 10
    max_tokens_per_step: int = 512
    temperature: float = 0.7
    tools_config: Mapping[str, Any] | Sequence[str] | None = None
    interactions_config: Mapping[str, Any] | None = None
    agent_config: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    concurrent_requests: int = 4
    include_trajectory_in_output: bool = True
    save_trajectories: bool = field(default_factory=_saves_by_default)
    trajectory_save_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Reject numbers with which no trajectory could run."""
        for name in ("max_steps", "max_tokens_per_step", "batch_size", "concurrent_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


class AgenticRollout:
    """Runs an agent over prompts.

    Args:
        config: The configuration, or a dict of its fields.
        llm_generate_func: `(messages, max_tokens=, temperature=, **kw)`, sync or async, or an
            object with such a `generate`. With None, the client of the endpoint that `OPENAI_*` or
            `ANTHROPIC_*` in the environment name.
        tokenizer: For token columns in `generate_sequences`: `encode`, `pad_token_id` and, for a
            chat format, `chat_template` with `apply_chat_template`.
        **kwargs: Fields of the configuration that replace its values.

    Raises:
        ValueError: Unknown agent type, tool or field; the message lists the known names.
    """

    def __init__(
        self,
        config: AgenticRolloutConfig | Mapping[str, Any] | None = None,
        llm_generate_func: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        _set_log_level()
        self.config = _config_of(config, kwargs)
        self.tokenizer = tokenizer
        self.llm_generate_func = llm_generate_func or client_from_environment()
        self.agent = self._make_agent()
        self._unsaved: list[Trajectory] = []
        # An unfinished batch is written when the rollout is garbage collected, at the latest.
        weakref.finalize(self, write_trajectories, self._save_folder(), self._unsaved)
        self._semaphores: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    @property
    def tools(self) -> dict[str, Any]:
        """The agent's tools by name; may be set."""
        return self.agent.tools

    @tools.setter
    def tools(self, tools: Mapping[str, Any]) -> None:
        self.agent.set_tools(tools)

    async def run_batch(self, prompts: Sequence[Mapping[str, Any] | str]) -> list[Trajectory]:
        """Run all prompts, at most `concurrent_requests` at a time; results keep their order.

        A failed prompt does not affect the others: its trajectory has the steps so far, is not
        completed, has no reward, and has `metadata["error"]`.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._run_one(number, prompt))
                for number, prompt in enumerate(prompts)
            ]
        self.flush()
        return [task.result() for task in tasks]

    async def generate_sequences(self, prompts: Any) -> Any:
        """Run a batch of prompts and return a batch of their trajectories, in order.

        Args:
            prompts: A DataProto (ours or verl's) with the prompts as `raw_prompt`, `messages`,
                `content` or `prompt`, or as `input_ids` for the tokenizer; or a list of prompts.

        Returns:
            A DataProto (verl's where verl is installed). With a tokenizer, the columns of
            `pipeline.tokens.padding.padded_columns`. A failed row has `failed` True, its `error`,
            an empty response, and NaN for its reward.
        """
        from workers.verl.rollout_batch import batch_of, prompts_of

        rows, meta_info = prompts_of(prompts, self.tokenizer)
        trajectories = await self.run_batch([row["prompt"] for row in rows])
        return batch_of(
            rows,
            trajectories,
            self.tokenizer,
            meta_info,
            with_trajectories=self.config.include_trajectory_in_output,
            tools=self.agent.offered_tools().get("tools", ()),
        )

    def flush(self) -> None:
        """Write the finished trajectories of an unfinished batch."""
        write_trajectories(self._save_folder(), self._unsaved)

    def _save_folder(self) -> Path:
        return Path(self.config.trajectory_save_path or DEFAULT_SAVE_PATH).absolute()

    def _make_agent(self) -> BaseAgent:
        config = self.config
        agent_class = get_agent_class(config.agent_type)
        check_agent_options(config.agent_type, config.agent_config)
        agent = agent_class(
            max_steps=config.max_steps,
            max_tokens_per_step=config.max_tokens_per_step,
            temperature=config.temperature,
            tools_config=config.tools_config,
            **config.agent_config,
        )
        agent.set_interactions(create_interactions(config.interactions_config))
        agent.on_finalized = self._keep
        return agent

    def _keep(self, trajectory: Trajectory) -> None:
        """Save a finished trajectory, also one of a direct call of the agent."""
        if self.config.save_trajectories:
            self._unsaved.append(trajectory)
            if len(self._unsaved) >= self.config.batch_size:
                self.flush()

    async def _run_one(self, number: int, prompt: Mapping[str, Any] | str) -> Trajectory:
        given = {"content": prompt} if isinstance(prompt, str) else dict(prompt)
        request_id = str(given.get("request_id") or f"{uuid.uuid4().hex[:12]}-{number}")
        trajectory = Trajectory(request_id)
        async with self._semaphore("trajectories"):
            try:
                return await self.agent.run_trajectory(
                    prompt=given,
                    llm_generate_func=self._bounded_llm,
                    request_id=request_id,
                    trajectory=trajectory,
                )
            except Exception as error:  # a row fails alone, with any exception of agent or client
                logger.warning("trajectory %s failed: %s", request_id, error)
                _mark_failed(trajectory, error)
                self._keep(trajectory)
                return trajectory

    async def _bounded_llm(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        if self.llm_generate_func is None:
            raise RuntimeError(
                "no model to call: pass llm_generate_func, or set OPENAI_API_KEY, OPENAI_BASE_URL "
                "or ANTHROPIC_API_KEY"
            )
        generate = getattr(self.llm_generate_func, "generate", self.llm_generate_func)
        async with self._semaphore("requests"):
            return await call_sync_or_async(generate, messages, **options)

    def _semaphore(self, kind: str) -> asyncio.Semaphore:
        # A semaphore belongs to one event loop; a rollout may be used in several in turn.
        semaphores = self._semaphores.setdefault(asyncio.get_running_loop(), {})
        if kind not in semaphores:
            semaphores[kind] = asyncio.Semaphore(self.config.concurrent_requests)
        return semaphores[kind]


def client_from_environment() -> Any:
    """Return the client of the endpoint that the environment names; None without an endpoint.

    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` take precedence over `ANTHROPIC_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_MODEL`. Without `OPENAI_MODEL` the client takes the only
    model that the endpoint lists.
    """
    environ = os.environ
    is_openai = any(environ.get(name) for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"))
    if not is_openai and not environ.get("ANTHROPIC_API_KEY"):
        return None
    # The client imports an SDK, which takes a second and is not needed with a function as client.
    from workers.llm.providers import find_provider, make_client

    if not is_openai:
        return make_client(environ=environ)
    model = environ.get("OPENAI_MODEL") or environ.get("MODEL_ID")
    base_url = environ.get("OPENAI_BASE_URL")
    if not base_url or find_provider(base_url=base_url).name == "openai":
        model = model or DEFAULT_OPENAI_MODEL
    return make_client(model=model, environ=environ, finds_model=True)


def create_agentic_rollout(config_dict: Mapping[str, Any], **kwargs: Any) -> AgenticRollout:
    """Make a rollout from a plain dict.

    Args:
        config_dict: Fields of `AgenticRolloutConfig`; or verl's form, with them under
            "agent_config" beside a "rollout_type".
        **kwargs: As `AgenticRollout`.
    """
    return AgenticRollout(config_dict, **kwargs)


def _config_of(
    config: AgenticRolloutConfig | Mapping[str, Any] | None, changes: Mapping[str, Any]
) -> AgenticRolloutConfig:
    if isinstance(config, AgenticRolloutConfig):
        given = {item.name: getattr(config, item.name) for item in fields(config)}
    else:
        given = dict(config or {})
        if given.pop("rollout_type", "agentic") != "agentic":
            raise ValueError("rollout_type must be 'agentic'")
        nested = given.get("agent_config") or {}
        known = {item.name for item in fields(AgenticRolloutConfig)}
        given["agent_config"] = {k: v for k, v in nested.items() if k not in known}
        given |= {k: v for k, v in nested.items() if k in known}
    given |= changes
    known_names = [item.name for item in fields(AgenticRolloutConfig)]
    if unknown := sorted(set(given) - set(known_names)):
        raise ValueError(
            f"unknown rollout settings: {', '.join(unknown)}; known: {', '.join(known_names)}"
        )
    return AgenticRolloutConfig(**given)


def _set_log_level() -> None:
    level = os.environ.get("AGENTIC_LOG_LEVEL", "").strip().upper()
    if not level:
        return
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"AGENTIC_LOG_LEVEL is {level!r}; set it to DEBUG, INFO, WARNING or ERROR")
    library = logging.getLogger("workers")
    library.setLevel(level)
    if not library.hasHandlers():
        library.addHandler(logging.StreamHandler())


def _mark_failed(trajectory: Trajectory, error: Exception) -> None:
    trajectory.is_completed = False
    trajectory.final_reward = None
    trajectory.metadata.pop("stop_reason", None)
    trajectory.metadata["error"] = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
