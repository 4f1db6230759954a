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
from pathlib import Path
from typing import Any

from workers.core.base_agent import BaseAgent
from workers.core.interaction import create_interactions
from workers.core.registry import check_agent_options, get_agent_class
from workers.core.rollout_config import AgenticRolloutConfig, read_rollout_config
from workers.core.sync_call import call_sync_or_async
from workers.core.trajectory import Trajectory
from workers.core.trajectory_files import write_trajectories

logger = logging.getLogger(__name__)

DEFAULT_SAVE_PATH = "./trajectories"
DEFAULT_OPENAI_MODEL = "gpt-4o-mini"  # where only OPENAI_API_KEY is set


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
        self.config = read_rollout_config(config, kwargs)
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
        agent.on_finalized = self._save
        return agent

    def _save(self, trajectory: Trajectory) -> None:
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
                self._save(trajectory)
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
