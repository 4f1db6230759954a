"""TRL's own trainers on batches of the pipeline; run by `make test-trl`."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from fixtures.token_runs import ONE, TWO, Said, token_run
from sqlalchemy import Engine

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.trainer.client import TrainerClient

pytest.importorskip("trl", reason="TRL is not installed: make test-trl installs it")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from pipeline.trainer.adapters.trl_rollouts import (
    CommitOnSave,
    PipelineRollouts,
    passthrough_reward,
)

VOCABULARY = 32
#: Two answers to one prompt, with a tool's tokens (8) in the middle; the second is rewarded.
BAD: list[Said] = [([1, 2], [6], [-3.0]), ([1, 2, 6, 8], [6, 3], [-3.0, -3.0])]
GOOD: list[Said] = [([1, 2], [7], [-3.0]), ([1, 2, 7, 8], [7, 3], [-3.0, -3.0])]


def finished(engine: Engine, *said: Sequence[Said], prompts: int = 4) -> str:
    return token_run(StoredRun(engine, prompts=prompts, n=2), *(said or (BAD, GOOD))).run.slug


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w3",
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=3,
            bos_token_id=None,
        )
    )


def trainer(rollouts: PipelineRollouts, folder: Path, **options: Any) -> GRPOTrainer:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_steps": 2,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        **options,
    }
    return GRPOTrainer(
        model=model(),
        reward_funcs=passthrough_reward,
        args=GRPOConfig(**given),
        train_dataset=Dataset.from_dict({"prompt": ["unused"] * 8}),
        processing_class=tokenizer(),
        rollout_func=rollouts,
        callbacks=[CommitOnSave(rollouts)],
    )


def margin(policy: Any) -> float:
    """How much more probable the rewarded answer is than the other one."""
    with torch.no_grad():
        found = torch.log_softmax(policy(torch.tensor([[1, 2]])).logits[0, -1], -1)
    return float(found[7] - found[6])


def consumed(engine: Engine, run: str) -> list[int]:
    client = TrainerClient(engine, run=run)
    return sorted(
        group.group_no for step in range(client.next_step()) for group in client.pull(step).groups
    )


class Recorded(PipelineRollouts):
    """Keeps the rollouts of each step."""

    def __init__(self, client: TrainerClient, **options: Any) -> None:
        super().__init__(client, **options)
        self.given: list[dict[str, list[Any]]] = []

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        self.given.append(super().__call__(prompts, trainer))
        return self.given[-1]


class KilledBeforeCommit(Recorded):
    """A process that ends between its checkpoint and the commit."""

    def commit(self, step: int, checkpoint_uri: str | None) -> None:
        raise KeyboardInterrupt


def test_the_trainer_learns_from_the_runs_rewards(engine: Engine, tmp_path: Path):
    name = finished(engine)
    rollouts = Recorded(TrainerClient(engine, run=name))
    grpo = trainer(rollouts, tmp_path)
    before = margin(grpo.model)
    grpo.train()
    assert grpo.state.global_step == 2
    assert margin(grpo.model) > before + 0.05
    first = rollouts.given[0]
    assert first["prompt_ids"] == [[1, 2]] * 4
    assert first["completion_ids"] == [[6, 8, 6, 3], [7, 8, 7, 3]] * 2
    assert first["env_mask"] == [[1, 0, 1, 1]] * 4
    assert first["logprobs"] == [[-3.0, 0.0, -3.0, -3.0]] * 4
    assert first["rollout_reward"] == [0.0, 1.0] * 2
    logged = grpo.state.log_history[0]
    assert logged["reward"] == 0.5
    assert logged["completions/mean_length"] == 3  # without the tool's token
    assert consumed(engine, name) == [0, 1, 2, 3]


def test_a_crash_between_checkpoint_and_commit_trains_no_group_twice(
    engine: Engine, tmp_path: Path
):
    name = finished(engine)
    killed = KilledBeforeCommit(TrainerClient(engine, run=name))
    with pytest.raises(KeyboardInterrupt):
        trainer(killed, tmp_path).train()
    assert consumed(engine, name) == []
    again = Recorded(TrainerClient(engine, run=name))
    trainer(again, tmp_path).train(resume_from_checkpoint=True)
    trained = [each for step in killed.given + again.given for each in step["rollout_id"]]
    assert len(trained) == len(set(trained)) == 8
    assert consumed(engine, name) == [0, 1, 2, 3]


def test_without_a_checkpoint_the_same_groups_come_again(engine: Engine, tmp_path: Path):
    name = finished(engine)
    first = Recorded(TrainerClient(engine, run=name))
    trainer(first, tmp_path, max_steps=1, save_strategy="no").train()
    again = Recorded(TrainerClient(engine, run=name))
    trainer(again, tmp_path, max_steps=1, save_strategy="no").train()
    assert first.given == again.given


def test_a_group_size_that_is_not_the_trainers_is_refused_and_nothing_kept(
    engine: Engine, tmp_path: Path
):
    name = finished(engine)
    rollouts = PipelineRollouts(TrainerClient(engine, run=name))
    with pytest.raises(NotAllowed, match=r"has 2 usable rollouts, not 4.*num_generations") as told:
        trainer(rollouts, tmp_path, num_generations=4).train()
    assert told.value.code == "E137"
    assert TrainerClient(engine, run=name).stats().groups["ready"] == 4


def test_a_run_that_ends_before_the_trainer_says_how_many_groups_are_left(
    engine: Engine, tmp_path: Path
):
    rollouts = PipelineRollouts(TrainerClient(engine, run=finished(engine, prompts=3)))
    with pytest.raises(NotAllowed, match="has 1 groups left, the trainer takes 2"):
        trainer(rollouts, tmp_path).train()
    rollouts = PipelineRollouts(TrainerClient(engine, run=finished(engine, prompts=2)))
    with pytest.raises(NotReady, match="no further groups"):
        trainer(rollouts, tmp_path / "other").train()


def test_rollouts_of_several_segments_are_refused_or_chosen_from(engine: Engine, tmp_path: Path):
    client = TrainerClient(engine, run=finished(engine, ONE, TWO))
    with pytest.raises(InputError, match="one row for each rollout"):
        PipelineRollouts(client, BatchSpec())
    with pytest.raises(NotAllowed, match="form 2 segments"):
        trainer(PipelineRollouts(client), tmp_path, max_steps=1).train()
    last = Recorded(client, spec=BatchSpec(segments="last"))
    trainer(last, tmp_path, max_steps=1).train()
    assert last.given[0]["completion_ids"] == [[3, 4, 5, 6], [6]] * 2


def test_processes_that_pull_at_once_share_the_groups_of_a_step(engine: Engine):
    name = finished(engine)
    begin = Barrier(2)

    def rows_of(rank: int) -> dict[str, list[Any]]:
        part = SimpleNamespace(num_processes=2, process_index=rank)
        process = SimpleNamespace(
            model=SimpleNamespace(training=True), num_generations=2, accelerator=part
        )
        rollouts = PipelineRollouts(TrainerClient(engine, run=name))
        begin.wait(10)
        return rollouts(["unused"] * 4, process)

    with ThreadPoolExecutor(2) as processes:
        first, second = processes.map(rows_of, range(2))
    assert [each["rollout_reward"] for each in (first, second)] == [[0.0, 1.0] * 2] * 2
    assert len({*first["rollout_id"], *second["rollout_id"]}) == 8
    assert TrainerClient(engine, run=name).stats().groups["leased"] == 4


def test_evaluations_are_refused(engine: Engine, tmp_path: Path):
    grpo = trainer(PipelineRollouts(TrainerClient(engine, run=finished(engine))), tmp_path)
    with pytest.raises(NotAllowed, match="evaluation"):
        grpo.evaluate(Dataset.from_dict({"prompt": ["unused"] * 4}))
