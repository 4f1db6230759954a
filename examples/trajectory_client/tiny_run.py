"""A small run in a temporary store, without a model and without a broker.

This process claims, executes and records each attempt, in place of the dispatcher, a worker and the
collector.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.contract.errors import ModelBadRequest
from pipeline.contract.run import RunConfig
from pipeline.embedded import EmbeddedServices
from pipeline.requests import request_of
from pipeline.settings import Settings, load_settings
from pipeline.store import schema
from pipeline.store.engine import open_engine, transact
from pipeline.store.outcomes import record_outcomes
from pipeline.store.prompts import PromptSource
from pipeline.store.rollouts import claim
from producers.datasets import Prompt
from producers.enqueue import enqueue
from workers.core.model_response import ModelResponse
from workers.process.execution import execute
from workers.process.runtime import Runtime

RUN = "tiny"
QUESTIONS = ("15 * 24", "17 + 4", "2 ** 10", "12 / 5")
CONFIG = RunConfig(
    agent="react",
    tools=("calculator",),
    reward="numeric",
    base_url="http://127.0.0.1:9/v1",
    n=3,
    max_attempts=1,
)


class ScriptedClient:
    """A model that calculates; of three answers the second is wrong, and one call is refused."""

    def __init__(self) -> None:
        self._answers = 0

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Call the tool, then answer."""
        question = next(str(m["content"]) for m in messages if m["role"] == "user")
        told = str(messages[-1]["content"])
        if not told.startswith("Observation:"):
            return _said(f"Thought: I calculate.\nAction: calculator(expression='{question}')")
        self._answers += 1
        if self._answers == 5:
            raise ModelBadRequest("This model does not take such messages.")
        found = told.removeprefix("Observation: ")
        return _said(f"Final Answer: {found if self._answers % 3 != 2 else 'no idea'}")


def _said(text: str) -> ModelResponse:
    return ModelResponse(text, finish_reason="stop", prompt_tokens=40, completion_tokens=12)


@contextmanager
def tiny_store() -> Iterator[Settings]:
    """Give the settings of a store with one finished run; it is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rollout-example-"))
    # Root's Postgres runs as another account, which must be able to pass through.
    folder.chmod(0o711)
    services = EmbeddedServices(folder / "data", durable=False)
    try:
        url = services.start_postgres()
        values = {"data_dir": folder / "data", "database": {"url": url}}
        settings = load_settings(overrides=values)
        asyncio.run(_fill(settings, url))
        yield settings
    finally:
        services.remove()
        shutil.rmtree(folder, ignore_errors=True)


async def _fill(settings: Settings, url: str) -> None:
    engine = open_engine(url)
    try:
        schema.upgrade(engine)
        prompts = [
            Prompt(row, {"content": question, "answer": _answer(question)})
            for row, question in enumerate(QUESTIONS)
        ]
        source = PromptSource("sums")
        run = enqueue(engine, run=RUN, config=CONFIG, source=source, prompts=prompts).run
        runtime = Runtime(settings, "this-process", make_client=lambda *_: client)
        client = ScriptedClient()
        for attempt in transact(engine, lambda c: claim(c, run, most=100, lease_s=60)):
            completion = await execute(request_of(run, attempt), runtime)
            transact(engine, lambda c, said=completion: record_outcomes(c, [said]))
    finally:
        engine.dispose()


def _answer(question: str) -> str:
    return {"15 * 24": "360", "17 + 4": "21", "2 ** 10": "1024", "12 / 5": "2.4"}[question]
