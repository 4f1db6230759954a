"""Train batches in verl's own forms, read by verl's own code; run by `make test-verl`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fixtures.stored_run import StoredRun
from fixtures.token_runs import ONE, TWO, WITHOUT_LOGPROBS, succeeded, token_run
from sqlalchemy import Engine

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.trainer.client import TrainerClient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "transfer_queue", reason="TransferQueue is not installed: make test-verl installs it"
    )
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils
    from verl.utils.import_utils import load_class_from_fqn

from pipeline.trainer.adapters.verl_batch import data_proto
from pipeline.trainer.adapters.verl_queue import CommitOnSave, PipelineManager, put_batch

ADAPTER = "pipeline.trainer.adapters.verl_queue"
ONE_ROW = BatchSpec(groups=2, segments="last")


def connect(engine: Engine, *said: Any, prompts: int = 2) -> TrainerClient:
    run = token_run(StoredRun(engine, prompts=prompts, n=2), *(said or (ONE, TWO))).run
    return TrainerClient(engine, run=run.slug)


# V0: DataProto


def test_verls_grpo_runs_on_a_pulled_batch(engine: Engine):
    data = data_proto(connect(engine).pull(0, ONE_ROW), pad_id=9)
    assert type(data).__module__ == "verl.protocol"
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=data.batch["rm_scores"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
    )
    mask = data.batch["response_mask"]
    low, high = advantages[0][mask[0] == 1], advantages[1][mask[1] == 1]
    assert torch.allclose(low, torch.tensor(-0.7071), atol=1e-3)
    assert torch.allclose(high, torch.tensor(0.7071), atol=1e-3)
    assert advantages[mask == 0].abs().sum() == 0


def test_a_data_proto_has_a_row_for_each_rollout_in_verls_layout(engine: Engine):
    batch = connect(engine).pull(0, ONE_ROW)
    data = data_proto(batch, prompt_length=2, response_length=4, pad_id=9)
    assert data.batch["prompts"].tolist() == [[1, 2], [2, 9]] * 2
    assert data.batch["responses"].tolist() == [[3, 4, 5, 6], [6, 9, 9, 9]] * 2
    assert data.batch["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]] * 2
    assert data.batch["rollout_log_probs"][0].tolist() == [-0.5, -0.25, 0, -1]
    assert data.batch["rm_scores"].sum(1).tolist() == [0, 1, 0, 1]
    ids = [str(rollout.rollout_id) for rollout in batch.rollouts()]
    assert list(data.non_tensor_batch["rollout_id"]) == ids
    assert len(set(data.non_tensor_batch["uid"])) == 2
    assert data.meta_info == {"global_steps": 0, "prompts_cut": 2, "responses_cut": 0}


def test_several_rows_of_a_rollout_are_refused_where_they_would_count_as_rollouts(engine: Engine):
    with pytest.raises(NotAllowed, match="segments='last'") as told:
        data_proto(connect(engine).pull(0))
    assert told.value.code == "E137"


def test_a_rollout_without_a_reward_is_refused(engine: Engine):
    story = StoredRun(engine, n=2, reward=None)
    story.record(*(succeeded(story, each, ONE, reward=None) for each in story.claim()))
    batch = TrainerClient(engine, run=story.run.slug).pull(0)
    for rollout in batch.rollouts():
        object.__setattr__(rollout, "reward", None)
    with pytest.raises(InputError, match="have no reward"):
        data_proto(batch)


# V1: TransferQueue


@pytest.fixture(scope="module")
def transfer_queue() -> Iterator[None]:
    """Ray on this machine alone, with one storage unit."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**27,
        _node_ip_address="127.0.0.1",
    )
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def buffer(transfer_queue: None) -> Iterator[Any]:
    """verl's replay buffer over an empty queue."""
    made = ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.01,
    )
    yield made
    for partition, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)


def prompts_of_verl(n: int, step: int, **fields: Any) -> Any:
    """What verl's trainer hands to its manager, after it registered the prompts."""
    batch = tensordict_utils.get_tensordict(
        {
            "uid": np.array([str(uuid.uuid4()) for _ in range(n)], dtype=object),
            "raw_prompt": np.array([[{"role": "user", "content": "?"}]] * n, dtype=object),
        }
    )
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
    for name, value in fields.items():
        tensordict_utils.assign_non_tensor_data(batch, name, value)
    tag = {"is_prompt": True, "status": "pending", "global_steps": step}
    tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=[dict(tag)] * n)
    return batch


def test_verls_replay_buffer_returns_our_groups(engine: Engine, buffer: Any):
    batch = connect(engine).pull(3)
    put_batch(batch, ["first", "second"], global_steps=3)
    found, _ = buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    assert sorted(found.keys) == [
        f"{uid}_{key}" for uid in ("first", "second") for key in ("0_0", "1_0", "1_1")
    ]
    data = tq.kv_batch_get(keys=found.keys, partition_id="train")
    places = {key: place for place, key in enumerate(found.keys)}
    row = places["first_0_0"]
    assert data["prompts"][row].tolist() == [1, 2]
    assert data["responses"][row].tolist() == [3, 4, 5, 6]
    assert data["response_mask"][row].tolist() == [1, 1, 0, 1]
    assert data["rollout_log_probs"][row].tolist() == [-0.5, -0.25, 0, -1]
    assert data["rm_scores"][places["first_1_1"]].tolist() == [1.0]
    assert data["position_ids"][row].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.tags[row]["seq_len"] == 6


class GrpoTrainer(PPOTrainer):
    """verl's trainer as far as it works without models: its advantages and its metrics."""

    use_critic = False
    _rollout_moe_lb_metrics_accumulator = None

    def __init__(self) -> None:
        self.config = OmegaConf.create(
            {
                "algorithm": {
                    "use_kl_in_reward": False,
                    "adv_estimator": "grpo",
                    "gamma": 1.0,
                    "lam": 1.0,
                },
                "actor_rollout_ref": {"rollout": {"n": 2}, "model": {}},
            }
        )

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...

    def _get_n_gpus_for_throughput(self) -> int:
        return 1


def test_verls_trainer_gives_all_rows_of_a_rollout_its_advantage(engine: Engine, buffer: Any):
    put_batch(connect(engine).pull(0), ["first", "second"], global_steps=7)
    found, _ = buffer.sample(global_steps=7, partition_id="train", batch_size=2)
    trainer, metrics = GrpoTrainer(), {}
    trainer._compute_advantage(found, metrics)
    given = tq.kv_batch_get(keys=found.keys, partition_id="train", select_fields=["advantages"])
    values = {
        key: sorted({round(float(value), 3) for value in row})
        for key, row in zip(found.keys, given["advantages"], strict=True)
    }
    assert values["first_0_0"] == [-0.707, 0.0]  # 0 for the tool's token
    assert values["first_1_0"] == values["first_1_1"] == [0.707]
    timing = {"step": 1.0, "gen": 1.0}
    trainer._compute_metrics(found, metrics, timing, global_steps=7, epoch=0)
    assert metrics["critic/rewards/mean"] == pytest.approx(2 / 3)  # by rows, as verl counts
    assert metrics["training/num_turns/max"] == 4
    assert metrics["training/off_policy/trajectory_staleness/max"] == 6


def test_rows_without_logprobs_are_put_without_them(engine: Engine, buffer: Any):
    put_batch(connect(engine, WITHOUT_LOGPROBS, prompts=1).pull(0), ["only"], global_steps=1)
    found, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    data = tq.kv_batch_get(keys=found.keys, partition_id="train")
    assert "rollout_log_probs" not in set(data.keys())


def test_ids_that_verl_could_not_split_are_refused(engine: Engine):
    batch = connect(engine).pull(0)
    with pytest.raises(InputError, match="separates the parts of a key"):
        put_batch(batch, ["a_b", "c"], global_steps=1)
    with pytest.raises(InputError, match="1 ids do not fit the 2 groups"):
        put_batch(batch, ["a"], global_steps=1)


def test_the_manager_fills_verls_prompts_step_by_step_and_commits_checkpoints(
    engine: Engine, buffer: Any
):
    client = connect(engine, prompts=4)
    manager = PipelineManager(client)
    callback = build_checkpoint_callback(
        OmegaConf.create({"trainer": {"checkpoint_callback_class": f"{ADAPTER}.CommitOnSave"}})
    )
    assert type(callback) is CommitOnSave
    trainer = type("Trainer", (), {"agent_loop_manager": manager})()
    seen: list[str] = []
    for step in (1, 2):
        prompts = prompts_of_verl(2, step)
        manager.generate_sequences(prompts)
        found, _ = buffer.sample(global_steps=step, partition_id="train", batch_size=2)
        assert {key.split("_")[0] for key in found.keys} == set(prompts["uid"])
        data = tq.kv_batch_get(keys=found.keys, partition_id="train")
        seen += sorted(set(data["rollout_id"]))
        tq.kv_clear(keys=found.keys, partition_id="train")
        callback.on_save(trainer, step, f"/checkpoints/{step}", async_save=step == 2)
    assert len(seen) == len(set(seen)) == 8
    assert client.stats().groups["consumed"] == 2  # the second one was still being written
    # A new process continues after the checkpoint of step 2, which is durable then.
    with pytest.raises(NotReady, match="no further groups"):
        PipelineManager(client).generate_sequences(prompts_of_verl(2, 3))
    assert client.stats().groups["consumed"] == 4


def test_what_a_run_cannot_give_is_refused_with_the_setting(engine: Engine, buffer: Any):
    client = connect(engine, prompts=3)
    manager = PipelineManager(client)
    with pytest.raises(NotAllowed, match=r"trainer\.test_freq=-1"):
        manager.generate_sequences(prompts_of_verl(2, 1, validate=True))
    manager.generate_sequences(prompts_of_verl(2, 1))
    with pytest.raises(NotAllowed, match="a second batch in its step 1"):
        manager.generate_sequences(prompts_of_verl(1, 1))
    with pytest.raises(NotAllowed, match="has 1 groups left, verl takes 2"):
        manager.generate_sequences(prompts_of_verl(2, 2))
    assert client.stats().groups["ready"] == 1


def test_verls_configuration_names_the_manager_and_its_run():
    manager = load_class_from_fqn(f"{ADAPTER}.PipelineManager", "AgentLoopManager")
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {}}})
    with pytest.raises(InputError, match=r"custom\.run=NAME"):
        manager.create(config=config, llm_client=None)
