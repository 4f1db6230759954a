"""The document's imports with verl itself, which loads our plug-in; run by `make test-verl`."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("verl", reason="verl is not installed: make test-verl installs it")
    from verl.protocol import DataProto  # pyright: ignore[reportMissingImports]
    from verl.workers.rollout.agentic_rollout import AgenticRollout  # pyright: ignore[reportMissingImports]

from workers import agentic_rollout


async def test_the_documents_import_gives_the_library() -> None:
    async def llm(messages, **options):
        return "Final Answer: 4"

    assert AgenticRollout is agentic_rollout.AgenticRollout
    rollout = AgenticRollout(agentic_rollout.AgenticRolloutConfig(), llm)
    prompts = DataProto.from_dict(tensors={}, non_tensors={"raw_prompt": ["2 + 2?"]})
    output = await rollout.generate_sequences(prompts)
    assert isinstance(output, DataProto)
    assert list(output.non_tensor_batch["response"]) == ["4"]


def test_the_packages_name_gives_it_too() -> None:
    from verl.workers.rollout import AgenticRollout as Again  # pyright: ignore[reportMissingImports]

    assert Again is AgenticRollout
