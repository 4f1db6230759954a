"""`generate_sequences` against verl's own DataProto and estimators; run by `make test-verl`."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.agents.react_agent import ReActAgent
from workers.core.registry import register_agent
from workers.core.trajectory import Trajectory
from workers.verl.data_proto import has_verl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    protocol = pytest.importorskip(
        "verl.protocol",
        reason="verl is not installed: make test-verl installs it",
        exc_type=ImportError,
    )
    import torch
    from verl.trainer.ppo import core_algos

DataProto = protocol.DataProto
PAD = 0
#: The model's answer by the question: an answer that needs a tool, a wrong one, none at all.
SCRIPT = {
    "6 * 7?": ["Action: calculator(expression='6 * 7')", "Final Answer: 42"],
    "6 * 7!": ["Final Answer: 41"],
    "broken": [ConnectionError("away")],
}


class ChatTokenizer:
    """One token per character, with a chat template and an end token."""

    pad_token_id = PAD
    chat_template = "a template"
    eos_token = "$"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}$" for m in messages)
        return text + "<a>" if add_generation_prompt else text


@register_agent("judged_react")
class JudgedReActAgent(ReActAgent):
    """Is right with 42."""

    def finalize_trajectory(self, trajectory: Trajectory) -> None:
        trajectory.final_reward = float(trajectory.get_final_response() == "42")
        super().finalize_trajectory(trajectory)


async def model(messages: list[dict[str, Any]], **options: Any) -> str:
    question = next(m["content"] for m in messages if m["role"] == "user")
    replies = next(replies for part, replies in SCRIPT.items() if part in question)
    reply = replies[sum(m["role"] == "assistant" for m in messages)]
    if isinstance(reply, Exception):
        raise reply
    return reply


def rollout() -> AgenticRollout:
    config = AgenticRolloutConfig(agent_type="judged_react", tools_config={"calculator": {}})
    return AgenticRollout(config, model, ChatTokenizer())


def batch_of(*questions: str) -> Any:
    """What verl's trainer has before generation: token columns and the prompts as chats."""
    width = max(map(len, questions))
    ids = torch.tensor([[PAD] * (width - len(q)) + [ord(c) for c in q] for q in questions])
    mask = (ids != PAD).long()
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1},
        non_tensors={
            "raw_prompt": np.array([[{"role": "user", "content": q}] for q in questions], object),
            "uid": np.array([f"u{number}" for number in range(len(questions))], object),
            "level": np.array([1] * len(questions), object),
        },
        meta_info={"global_steps": 3},
    )


def text_of(ids: Any, mask: Any = None) -> str:
    kept = [int(t) for n, t in enumerate(ids) if int(t) and (mask is None or int(mask[n]))]
    return "".join(map(chr, kept))


async def test_a_batch_of_verl_is_answered_with_one_in_its_layout():
    assert has_verl()
    batch = batch_of("6 * 7?", "6 * 7!")
    out = await rollout().generate_sequences(batch)
    assert type(out) is DataProto
    columns = dict(out.batch.items())
    n, width_p = columns["prompts"].shape
    width_r = columns["responses"].shape[1]
    assert n == 2
    assert {name: columns[name].dtype for name in columns if name != "rm_scores"} == dict.fromkeys(
        ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
        torch.int64,
    )
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert columns[name].shape == (2, width_p + width_r)
    joined = torch.cat([columns["prompts"], columns["responses"]], dim=1)
    assert torch.equal(columns["input_ids"], joined)
    positions = (columns["attention_mask"].cumsum(1) - 1).clip(min=0)
    assert torch.equal(columns["position_ids"], positions)
    assert columns["prompts"][0][-1] != PAD
    assert columns["responses"][1][-1] == PAD
    sampled = [text_of(columns["responses"][n], columns["response_mask"][n]) for n in range(2)]
    assert sampled == [
        "Action: calculator(expression='6 * 7')$Final Answer: 42$",
        "Final Answer: 41$",
    ]
    assert columns["rm_scores"].dtype == torch.float32
    assert columns["rm_scores"].sum(1).tolist() == [1.0, 0.0]
    last = int(columns["attention_mask"][0, width_p:].sum()) - 1
    assert columns["rm_scores"][0, last] == 1.0


async def test_other_columns_pass_through_as_objects_in_order():
    out = await rollout().generate_sequences(batch_of("6 * 7!", "6 * 7?"))
    assert all(column.dtype == object for column in out.non_tensor_batch.values())
    assert list(out.non_tensor_batch["uid"]) == ["u0", "u1"]
    assert list(out.non_tensor_batch["level"]) == [1, 1]
    assert list(out.non_tensor_batch["__num_turns__"]) == [2, 4]
    assert list(out.non_tensor_batch["multi_modal_inputs"]) == [{}, {}]
    assert out.meta_info["global_steps"] == 3


async def test_the_trainers_own_way_pop_repeat_generate_union_works():
    batch = batch_of("6 * 7?", "6 * 7!")
    asked = batch.pop(
        batch_keys=["input_ids", "attention_mask", "position_ids"],
        non_tensor_batch_keys=["raw_prompt"],
    ).repeat(repeat_times=2, interleave=True)
    out = await rollout().generate_sequences(asked)
    out.non_tensor_batch.pop("uid")
    joined = batch.repeat(repeat_times=2, interleave=True).union(out)
    assert list(joined.non_tensor_batch["uid"]) == ["u0", "u0", "u1", "u1"]
    assert joined.batch["rm_scores"].sum(1).tolist() == [1.0, 1.0, 0.0, 0.0]


async def test_prompts_may_be_verls_tokens():
    batch = batch_of("6 * 7?", "long: 6 * 7!").select(non_tensor_batch_keys=["uid"])
    out = await rollout().generate_sequences(batch)
    assert list(out.non_tensor_batch["response"]) == ["42", "41"]


async def test_verls_own_operations_keep_every_row(tmp_path):
    out = await rollout().generate_sequences(batch_of("6 * 7?", "6 * 7!", "6 * 7?"))
    padded, n_pad = protocol.pad_dataproto_to_divisor(out, 4)
    assert (len(padded), n_pad) == (4, 1)
    again = DataProto.concat(padded.chunk(2))
    again = protocol.unpad_dataproto(again, n_pad)
    out.save_to_disk(tmp_path / "batch.pt")
    for copy in (
        again,
        pickle.loads(pickle.dumps(out)),
        DataProto.load_from_disk(tmp_path / "batch.pt"),
    ):
        assert torch.equal(copy.batch["responses"], out.batch["responses"])
        assert list(copy.non_tensor_batch["response"]) == ["42", "41", "42"]


async def test_verls_grpo_gives_model_tokens_the_advantage_and_tool_tokens_none():
    out = await rollout().generate_sequences(batch_of("6 * 7?", "6 * 7!"))
    mask = out.batch["response_mask"]
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=out.batch["rm_scores"],
        response_mask=mask,
        index=np.array(["same", "same"], object),
    )
    assert torch.allclose(advantages[0][mask[0] == 1], torch.tensor(0.7071), atol=1e-3)
    assert torch.allclose(advantages[1][mask[1] == 1], torch.tensor(-0.7071), atol=1e-3)
    assert advantages[mask == 0].abs().sum() == 0


async def test_a_failed_row_is_no_number_and_says_so():
    out = await rollout().generate_sequences(batch_of("6 * 7?", "broken"))
    assert out.meta_info["failed_rows"] == [1]
    assert list(out.non_tensor_batch["failed"]) == [False, True]
    assert torch.isnan(out.batch["rm_scores"][1]).all()
    assert out.batch["response_mask"][1].sum() == 0
