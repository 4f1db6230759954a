"""A function agent with a client of its own: its calls are recorded as those through `llm`."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.scripted_model import scripted_model
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.trajectory import unpack_record
from workers.core.endpoint import Endpoint
from workers.core.registry import register_agent


@pytest.fixture(autouse=True)
def _agents() -> None:
    import openai

    @register_agent("sdk")
    async def solve(prompt: dict[str, Any], llm: Any, endpoint: Endpoint) -> str:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key
        ) as client:
            answer = await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": prompt["content"]}]
            )
        return answer.choices[0].message.content or ""


def test_calls_of_an_agents_own_client_are_recorded(engine: Engine, make_worker):
    story = StoredRun(engine, agent="sdk", agent_config={"require_model_calls": True})
    with scripted_model(lambda _: "1") as model:
        (completion,) = make_worker(model.base_url).work(story)
    assert completion.outcome == "succeeded", completion.error
    assert (completion.reward, completion.n_turns) == (1.0, 1)
    assert (completion.prompt_tokens, completion.completion_tokens) == (11, 7)
    record = unpack_record(completion.body)
    assert record.messages == [
        {"role": "user", "content": "What is 0 + 1?"},
        {"role": "assistant", "content": "1"},
    ]
    assert [call.endpoint for call in record.calls] == [model.base_url]
