import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from workers.core.json_safe import TOO_DEEP, json_safe
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

ROOT = Path(__file__).resolve().parents[3]

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=3)
steps = st.builds(
    TrajectoryStep,
    step_type=st.sampled_from(StepType),
    content=st.text(),
    metadata=json_objects,
    tool_name=st.none() | st.text(),
    tool_args=st.none() | json_objects,
    tool_result=json_values,
    reward_score=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    is_correct=st.none() | st.booleans(),
    log_probs=st.none() | st.lists(st.floats(max_value=0, allow_infinity=False), max_size=4),
    attention_mask=st.none() | st.lists(st.integers(0, 1), max_size=4),
)
trajectories = st.builds(
    Trajectory,
    request_id=st.text(),
    steps=st.lists(steps, max_size=4),
    metadata=json_objects,
    is_completed=st.booleans(),
    final_reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    total_tokens=st.integers(min_value=0),
)


@given(trajectories)
@settings(max_examples=80, deadline=None)
def test_a_trajectory_survives_json_without_loss(trajectory):
    text = json.dumps(trajectory.to_dict(), allow_nan=False)
    assert Trajectory.from_dict(json.loads(text)) == trajectory


def test_the_exported_keys_are_the_contract():
    step = TrajectoryStep(StepType.ACTION, "x")
    data = Trajectory("r", [step]).to_dict()
    assert list(data) == [
        "request_id",
        "steps",
        "metadata",
        "is_completed",
        "final_reward",
        "total_tokens",
    ]
    assert list(data["steps"][0]) == [
        "step_type",
        "content",
        "metadata",
        "tool_name",
        "tool_args",
        "tool_result",
        "reward_score",
        "is_correct",
        "log_probs",
        "attention_mask",
    ]
    assert data["steps"][0]["step_type"] == "action"


def test_keys_that_are_absent_take_their_defaults():
    data = {"request_id": "r", "steps": [{"step_type": "thought", "content": "t"}], "other": 1}
    assert Trajectory.from_dict(data) == Trajectory("r", [TrajectoryStep(StepType.THOUGHT, "t")])


@dataclass
class Point:
    x: float


class Answer(BaseModel):
    value: int


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


class FailingModel:
    def model_dump(self):
        raise RuntimeError("no dump")


@pytest.mark.parametrize(
    ("value", "safe"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        ((1, 2), [1, 2]),
        ({3}, [3]),
        ({1: "a", StepType.ACTION: "b"}, {"1": "a", "action": "b"}),
        (b"ab\xff", "ab\\xff"),
        (StepType.THOUGHT, "thought"),
        (Point(1.5), {"x": 1.5}),
        (Answer(value=3), {"value": 3}),
        (Path("/x"), "/x"),
        (Unprintable(), "<Unprintable>"),
        (FailingModel(), "<FailingModel: no dump>"),
    ],
)
def test_what_json_has_not_becomes_something_it_has(value, safe):
    assert json_safe(value) == safe


def test_an_integer_too_long_for_decimal_text_is_written_in_hexadecimal():
    assert json_safe([2**20_000]) == [hex(2**20_000)]


def test_a_numpy_array_becomes_a_list():
    np = pytest.importorskip("numpy")
    assert json_safe({"a": np.array([1, 2]), "b": np.float32(0.5)}) == {"a": [1, 2], "b": 0.5}


def test_a_cycle_ends():
    cycle: list = []
    cycle.append(cycle)
    assert TOO_DEEP in json.dumps(json_safe(cycle))


def test_what_the_model_was_told_is_user_and_the_rest_assistant():
    roles = {kind: TrajectoryStep(kind, "c").to_message()["role"] for kind in StepType}
    assert [kind.value for kind, role in roles.items() if role == "user"] == [
        "observation",
        "action_result",
    ]
    assert set(roles.values()) == {"user", "assistant"}


def test_the_final_response_is_the_last_answer_and_nothing_else():
    trajectory = Trajectory("r")
    assert trajectory.get_final_response() == ""
    trajectory.add_step(TrajectoryStep(StepType.THOUGHT, "thinking"))
    trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, "seen"))
    trajectory.add_step(TrajectoryStep(StepType.ACTION, "calculator(expression='6 * 7 == 42')"))
    assert trajectory.get_final_response() == ""
    trajectory.add_step(TrajectoryStep(StepType.FINAL_ANSWER, "42"))
    trajectory.add_step(TrajectoryStep(StepType.THOUGHT, "afterthought"))
    assert trajectory.get_final_response() == "42"


def test_an_answer_that_an_interaction_replied_to_is_still_the_last_answer():
    answer = TrajectoryStep(StepType.THOUGHT, "41", {"answered_by": "checker"})
    steps = [answer, TrajectoryStep(StepType.OBSERVATION, "Look again.")]
    assert Trajectory("r", steps).get_final_response() == "41"


def test_the_total_reward_counts_scored_steps_only():
    scores = (0.5, None, -0.25)
    trajectory = Trajectory(
        "r", [TrajectoryStep(StepType.THOUGHT, "", reward_score=score) for score in scores]
    )
    assert trajectory.get_total_reward() == 0.25
    assert Trajectory("r").get_total_reward() == 0.0


def test_steps_of_one_reply_are_one_message():
    reply = {"role": "assistant", "content": "Thought: t\nAction: f()"}
    trajectory = Trajectory("r", metadata={"system_prompt": "Be brief."})
    trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, "q"))
    trajectory.add_step(TrajectoryStep(StepType.THOUGHT, "t", {"chat_message": reply}))
    trajectory.add_step(TrajectoryStep(StepType.ACTION, "f()", {"chat_message": None}))
    assert trajectory.get_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        reply,
    ]


def test_tokens_are_summed_and_an_estimate_says_so():
    trajectory = Trajectory("r")
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    trajectory.add_step(TrajectoryStep(StepType.THOUGHT, "", {"usage": usage}))
    assert "tokens_estimated" not in trajectory.metadata
    estimate = {**usage, "estimated": True}
    trajectory.add_step(TrajectoryStep(StepType.THOUGHT, "", {"usage": estimate}))
    assert trajectory.total_tokens == 26
    assert trajectory.metadata["usage"] == {
        "model_calls": 2,
        "prompt_tokens": 20,
        "completion_tokens": 6,
    }
    assert trajectory.metadata["tokens_estimated"] is True


def test_importing_it_loads_the_standard_library_only():
    code = (
        "import sys, workers.core.trajectory\n"
        "ours = {name for name in sys.modules if name.split('.')[0] in ('workers', 'pipeline')}\n"
        "assert ours == {'workers', 'workers.core', 'workers.core.json_safe',"
        " 'workers.core.trajectory'}, ours\n"
        "known = sys.stdlib_module_names | {'workers', '__main__', 'sitecustomize'}\n"
        "foreign = {name.split('.')[0] for name in sys.modules} - known\n"
        "assert not foreign & {'openai', 'celery', 'pydantic', 'numpy', 'anyio'}, foreign\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=30)
