import dataclasses
import sys
import types
from typing import Any

import pytest

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.core.model_response import ModelResponse

np = pytest.importorskip("numpy")

from workers.verl.data_proto import DataProto, has_verl  # noqa: E402
from workers.verl.token_rows import token_row  # noqa: E402

PAD = 0


class CharTokenizer:
    """One token per character: its code."""

    pad_token_id = PAD

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class ChatTokenizer(CharTokenizer):
    """With a chat template and an end token, as trained models have."""

    chat_template = "a template"
    eos_token = "$"

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"<{m['role'][0]}>{m['content']}$" for m in messages)
        return text + "<a>" if add_generation_prompt else text


def rollout_of(model: Any, tokenizer: Any = None, **settings: Any) -> AgenticRollout:
    config = AgenticRolloutConfig(**{"agent_type": "single_turn", **settings})
    return AgenticRollout(config, model, tokenizer)


async def echo(messages: list[dict[str, Any]], **options: Any) -> str:
    if messages[-1]["content"] == "bad":
        raise ConnectionError("away")
    return messages[-1]["content"] + "!"


def text_of(ids: Any, mask: Any = None) -> str:
    return "".join(chr(t) for n, t in enumerate(ids) if t and (mask is None or mask[n]))


async def test_without_a_tokenizer_rows_are_text():
    batch = DataProto.from_dict(
        non_tensors={"raw_prompt": [[{"role": "user", "content": "a"}], "b"], "level": [1, 2]},
        meta_info={"step": 7},
    )
    out = await rollout_of(echo).generate_sequences(batch)
    assert isinstance(out, DataProto)
    assert len(out) == 2
    assert out.batch == {}
    assert list(out.non_tensor_batch["response"]) == ["a!", "b!"]
    assert list(out.non_tensor_batch["level"]) == [1, 2]
    assert list(out.non_tensor_batch["__num_turns__"]) == [2, 2]
    assert out.non_tensor_batch["trajectory"][0]["is_completed"] is True
    assert out.meta_info == {"step": 7, "failed_rows": []}


async def test_trajectories_can_be_left_out_and_prompts_be_a_list():
    rollout = rollout_of(echo, include_trajectory_in_output=False)
    out = await rollout.generate_sequences(["a", {"content": "b"}])
    assert "trajectory" not in out.non_tensor_batch
    assert list(out.non_tensor_batch["response"]) == ["a!", "b!"]
    assert len(set(out.non_tensor_batch["uid"])) == 2


async def test_with_a_tokenizer_rows_have_the_trainers_layout():
    out = await rollout_of(echo, ChatTokenizer()).generate_sequences(["ab", "c"])
    columns = out.batch
    assert {str(column.dtype) for column in columns.values()} == {"int64"}
    assert [text_of(row) for row in columns["prompts"]] == ["<u>ab$<a>", "<u>c$<a>"]
    assert columns["prompts"][1][0] == PAD
    assert [text_of(row) for row in columns["responses"]] == ["ab!$", "c!$"]
    assert columns["responses"][1][-1] == PAD
    assert columns["response_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert columns["attention_mask"].tolist() == [[1] * 13, [0] + [1] * 11 + [0]]
    assert columns["position_ids"][1].tolist() == [0, *range(11), 10]
    joined = np.concatenate([columns["prompts"], columns["responses"]], axis=1)
    assert (columns["input_ids"] == joined).all()


async def test_what_tools_and_the_template_say_is_not_masked_as_sampled(script):
    model = script("Action: calculator(expression='2*3')", "Final Answer: 6")
    rollout = rollout_of(
        model, ChatTokenizer(), agent_type="react", tools_config={"calculator": {}}
    )
    out = await rollout.generate_sequences(["q"])
    response, mask = out.batch["responses"][0], out.batch["response_mask"][0]
    assert text_of(response, mask) == "Action: calculator(expression='2*3')$Final Answer: 6$"
    assert text_of(response, 1 - mask) == "<u>Observation: 6$<a>"
    assert text_of(out.batch["prompts"][0]).endswith("<u>q$<a>")


async def test_a_tokenizer_without_a_template_gets_plain_text():
    out = await rollout_of(echo, CharTokenizer()).generate_sequences(["ab"])
    assert text_of(out.batch["prompts"][0]) == "user: ab\nassistant: "
    mask = out.batch["response_mask"][0]
    assert text_of(out.batch["responses"][0], mask) == "ab!"


async def test_recorded_tokens_are_used_as_they_were_sampled(script):
    model = script(
        ModelResponse(
            "Action: f()",
            prompt_tokens=3,
            completion_tokens=2,
            prompt_token_ids=[1, 2, 3],
            completion_token_ids=[4, 5],
            logprobs=[-0.5, -0.25],
        ),
        ModelResponse(
            "Final Answer: x",
            prompt_tokens=7,
            completion_tokens=1,
            prompt_token_ids=[1, 2, 3, 4, 5, 6, 7],
            completion_token_ids=[8],
            logprobs=[-1.0],
        ),
    )
    rollout = rollout_of(model, CharTokenizer(), agent_type="react")
    rollout.tools = {"f": lambda: "x"}
    out = await rollout.generate_sequences(["q"])
    assert out.batch["prompts"].tolist() == [[1, 2, 3]]
    assert out.batch["responses"].tolist() == [[4, 5, 6, 7, 8]]
    assert out.batch["response_mask"].tolist() == [[1, 1, 0, 0, 1]]
    assert out.batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0, 0, -1.0]]


async def test_recorded_tokens_that_do_not_continue_are_not_mixed_with_others(script):
    ids = {"prompt_tokens": 1, "completion_tokens": 1, "logprobs": [-1.0]}
    model = script(
        ModelResponse("Action: f()", prompt_token_ids=[1], completion_token_ids=[2], **ids),
        ModelResponse("Final Answer: x", prompt_token_ids=[1, 9], completion_token_ids=[3], **ids),
    )
    rollout = rollout_of(model, ChatTokenizer(), agent_type="react")
    rollout.tools = {"f": lambda: "x"}
    out = await rollout.generate_sequences(["q"])
    mask = out.batch["response_mask"][0]
    assert text_of(out.batch["responses"][0], mask) == "Action: f()$Final Answer: x$"
    assert "rollout_log_probs" not in out.batch


async def test_a_failed_row_is_marked_and_never_has_a_reward():
    class Scored(AgenticRollout):
        async def run_batch(self, prompts):
            trajectories = await super().run_batch(prompts)
            for trajectory in trajectories:
                if trajectory.is_completed:
                    trajectory.final_reward = 0.0
            return trajectories

    config = AgenticRolloutConfig(agent_type="single_turn")
    out = await Scored(config, echo, ChatTokenizer()).generate_sequences(["ok", "bad"])
    assert list(out.non_tensor_batch["failed"]) == [False, True]
    assert out.non_tensor_batch["error"][0] is None
    assert out.non_tensor_batch["error"][1]["message"] == "away"
    assert list(out.non_tensor_batch["reward"]) == [0.0, None]
    assert out.meta_info["failed_rows"] == [1]
    assert text_of(out.batch["prompts"][1]) == "<u>bad$<a>"
    assert out.batch["response_mask"][1].sum() == 0
    assert out.batch["rm_scores"][0].sum() == 0
    assert np.isnan(out.batch["rm_scores"][1]).all()


async def test_prompts_may_be_tokens():
    tokenizer = CharTokenizer()
    ids = np.array([[PAD, ord("h"), ord("i")]])
    batch = DataProto.from_dict({"input_ids": ids, "attention_mask": (ids != PAD).astype(int)})
    out = await rollout_of(echo, tokenizer).generate_sequences(batch)
    assert list(out.non_tensor_batch["response"]) == ["hi!"]
    with pytest.raises(ValueError, match="the batch has no prompts"):
        await rollout_of(echo).generate_sequences(batch)


async def test_a_reply_of_tool_calls_only_counts_as_sampled(script, calls):
    model = script(calls(("f", "{}")), ModelResponse("done"))
    rollout = rollout_of(model, CharTokenizer(), agent_type="tool")
    rollout.tools = {"f": lambda: "x"}
    (trajectory,) = await rollout.run_batch(["q"])
    row = token_row(trajectory, CharTokenizer())
    assert not row.is_recorded
    assert len(row.response_ids) == len(row.response_mask)
    assert "done" in text_of(row.response_ids, row.response_mask)


class ToolTokenizer(ChatTokenizer):
    """Its template writes the offered tools, and the calls of a reply behind its text."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        text = "".join(f"<tool {tool['function']['name']}>" for tool in tools or ())
        for message in messages:
            said = "".join(
                f"[{call['function']['name']}]" for call in message.get("tool_calls") or ()
            )
            text += f"<{message['role'][0]}>{message['content'] or ''}{said}$\n"
        return text + "<a>" if add_generation_prompt else text


@pytest.mark.parametrize(
    ("content", "sampled"), [("I look.", "I look.[f]$done$"), ("", "[f]$done$")]
)
async def test_text_and_call_of_one_reply_and_its_end_token_count_as_sampled(
    script, calls, content, sampled
):
    reply = dataclasses.replace(calls(("f", "{}")), text=content)
    rollout = rollout_of(script(reply, ModelResponse("done")), ToolTokenizer(), agent_type="tool")
    rollout.tools = {"f": lambda: "x"}
    out = await rollout.generate_sequences(["q"])
    assert text_of(out.batch["prompts"][0]).startswith("<tool f><")
    assert text_of(out.batch["responses"][0], out.batch["response_mask"][0]) == sampled


def test_columns_of_unequal_length_are_refused():
    assert len(DataProto()) == 0
    with pytest.raises(ValueError, match="must be equally long"):
        DataProto.from_dict({"x": [1, 2]}, {"y": [1]})


async def test_verls_own_class_is_used_where_verl_is_installed(monkeypatch):
    made: list[dict[str, Any]] = []

    class VerlDataProto:
        @classmethod
        def from_dict(cls, tensors, non_tensors, meta_info):
            made.append({"tensors": tensors, "non_tensors": non_tensors, "meta_info": meta_info})
            return cls()

    torch = types.SimpleNamespace(from_numpy=lambda column: ("torch", column))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    protocol = types.SimpleNamespace(DataProto=VerlDataProto)
    monkeypatch.setitem(sys.modules, "verl.protocol", protocol)
    assert has_verl()
    out = await rollout_of(echo, ChatTokenizer()).generate_sequences(["ab"])
    assert isinstance(out, VerlDataProto)
    assert made[0]["tensors"]["prompts"][0] == "torch"
    assert made[0]["non_tensors"]["response"].dtype == object
