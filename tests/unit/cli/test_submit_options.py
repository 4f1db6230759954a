"""What the options of `run` and `submit` ask for, and what things are called by default."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from pipeline.contract.errors import InputError
from pipeline.contract.run import RunConfig, check_slug
from pipeline.settings.sections import AgentCoreSettings
from rollout.run_options import SubmitOptions, run_config
from rollout.submission import name_and_split, new_slug

PLAIN = SubmitOptions(dataset="questions.jsonl")


def config(**options) -> RunConfig:
    return run_config(replace(PLAIN, **options), {})


def test_without_options_a_run_asks_for_its_defaults():
    assert config() == RunConfig()


def test_help_names_the_defaults_of_a_run():
    told = {}
    for name, hint in get_type_hints(SubmitOptions, include_extras=True).items():
        text = getattr(get_args(hint)[1], "help", "") if get_args(hint) else ""
        if found := re.search(r"\(default: ([\w.]+)\)", text):
            told[name] = found[1]
    asked = RunConfig()
    known = {**asked.limits.model_dump(), **asked.model_dump()}
    assert {"n", "max_attempts", "max_tokens", "timeout_s", "purpose", "queue"} <= told.keys()
    for name, value in told.items():
        expected = known[name]
        assert value == (f"{expected:g}" if isinstance(expected, float) else str(expected)), name


def test_options_become_fields():
    asked = config(
        agent="react",
        tools="calculator, finish",
        reward="gsm8k",
        n=4,
        max_attempts=5,
        max_steps=7,
        max_tokens=99,
        timeout_s=3.5,
        temperature=0.5,
        seed=1,
        purpose="eval",
    )
    assert asked == RunConfig.model_validate(
        {
            "agent": "react",
            "tools": ("calculator", "finish"),
            "reward": "gsm8k",
            "n": 4,
            "max_attempts": 5,
            "limits": {"max_steps": 7, "max_tokens": 99, "timeout_s": 3.5},
            "sampling": {"temperature": 0.5, "seed": 1},
            "purpose": "eval",
        }
    )


def test_reward_none_means_unscored():
    assert config(reward="none").reward is None


def test_any_field_can_be_set_as_json_or_text():
    asked = config(
        set=[
            "limits.max_steps=20",
            'on_error={"agent_timeout": "fail"}',
            "sampling.stop=END",
            "max_in_flight=3",
        ]
    )
    assert asked.limits.max_steps == 20
    assert asked.on_error == {"agent_timeout": "fail"}
    assert asked.sampling == {"stop": "END"}
    assert asked.max_in_flight == 3


def test_rows_of_the_error_table_can_be_changed_one_by_one():
    asked = config(on_error=["agent_bug=fail", "reward_error=retry"], set=["on_error.sandbox=fail"])
    assert asked.on_error == {"agent_bug": "fail", "reward_error": "retry", "sandbox": "fail"}


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("agent_bug", "--on-error agent_bug has no `=`"),
        ("agent_bugs=fail", "on_error.agent_bugs cannot be 'agent_bugs'"),
        ("agent_bug=ignore", "on_error.agent_bug cannot be 'ignore'"),
        ("model_transport=score", "nothing to score"),
        ("worker_lost=retry_lost", "cannot be handled by"),
    ],
)
def test_a_row_that_cannot_be_so_is_named(assignment, says):
    with pytest.raises(InputError, match=re.escape(says)) as refused:
        config(on_error=[assignment])
    assert refused.value.code == "E106"


def test_what_the_settings_say_of_runs_stands_below_the_options():
    defaults = {"n": 4, "agent": "react", "on_error": {"sandbox": "fail", "agent_bug": "fail"}}
    options = replace(PLAIN, n=8, on_error=["agent_bug=retry_free"])
    asked = run_config(options, defaults)
    assert (asked.n, asked.agent) == (8, "react")
    assert asked.on_error == {"sandbox": "fail", "agent_bug": "retry_free"}
    assert defaults["on_error"] == {"sandbox": "fail", "agent_bug": "fail"}, "as it was"


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300"])
@pytest.mark.parametrize("field", ["limits.timeout_s", "group_deadline_s", "backoff_max_s"])
def test_a_time_that_no_clock_can_tell_is_refused(field, seconds):
    with pytest.raises(InputError, match=re.escape(field)):
        config(set=[f"{field}={seconds}"])


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("limitz=3", "Did you mean limits?"),
        ("limits.max_step=3", "Did you mean max_steps?"),
        ("n", "no `=`"),
        ("n=0", "n cannot be 0"),
        ("agent.name=x", "agent"),
        ("purpose=play", "purpose"),
        ("n_min=9", "n_min=9"),
        ("on_error.model_transport=score", "nothing to score"),
    ],
)
def test_a_field_that_cannot_work_is_named(assignment, says):
    with pytest.raises(InputError, match=re.escape(says)) as refused:
        config(set=[assignment])
    assert refused.value.code == "E106"


@pytest.mark.parametrize(
    ("dataset", "called"),
    [
        ("/data/gsm8k/test.jsonl", ("gsm8k", "test")),
        ("/data/gsm8k/train.jsonl.gz", ("gsm8k", "train")),
        ("/data/questions.jsonl", ("questions", "train")),
        ("/elsewhere/questions.jsonl", ("questions", "train")),
        ("hf:openai/gsm8k:main", ("openai/gsm8k:main", "train")),
    ],
)
def test_rows_are_called_after_the_dataset_wherever_it_lies(dataset, called):
    assert name_and_split(SubmitOptions(dataset=dataset)) == called


def test_names_that_are_given_win():
    options = replace(PLAIN, dataset_name="mine", split="dev")
    assert name_and_split(options) == ("mine", "dev")


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k:main", "Ünïcode ☃", "x" * 200, "--", ""])
def test_a_made_up_name_can_name_a_run(name):
    assert check_slug(new_slug(name)) != new_slug(name)


def test_a_made_up_name_says_which_dataset():
    assert re.fullmatch("gsm8k-[0-9a-f]{4}", new_slug("openai/gsm8k:main"))


def test_a_remote_agent_is_scored_by_its_app_unless_a_reward_is_named():
    remote = {"executor": "agentcore", "target": "http://127.0.0.1:8080"}
    settings = AgentCoreSettings(results_bucket="b")
    named = run_config(replace(PLAIN, reward="gsm8k", **remote), {}, agentcore=settings)
    assert named.reward == "gsm8k"
    # A default for all runs is no wish of this one.
    asked = run_config(replace(PLAIN, **remote), {"reward": "gsm8k"}, agentcore=settings)
    assert asked.reward is None
