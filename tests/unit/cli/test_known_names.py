"""What a run names is checked where it is submitted, as far as it is known there."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.contract.errors import InputError
from pipeline.contract.run import RunConfig
from rollout.known_names import find_unknown


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"agent": "coding", "agent_config": {"sandbox_limit": {}}}, "'sandbox_limits'?"),
        ({"agent": "react", "agent_config": {"max_steps": "abc"}}, "max_steps cannot be 'abc'"),
        ({"tools": ["search"], "tools_config": {"search": {"max_result": 1}}}, "'max_results'?"),
        ({"tools": ["search"], "tools_config": {"serach": {}}}, "Did you mean 'search'?"),
        ({"reward": "numeric", "reward_config": {"tolerance": "abc"}}, "tolerance cannot be 'abc'"),
        ({"reward": None, "reward_config": {"tolerance": 1}}, "no reward"),
    ],
)
def test_an_option_that_nobody_takes_is_refused_before_anything_is_enqueued(
    asked: dict[str, Any], meant: str
) -> None:
    with pytest.raises(InputError) as refused:
        find_unknown(RunConfig.model_validate(asked), plugins=())
    assert meant in str(refused.value)
    assert refused.value.code == "E106"


def test_options_of_what_only_the_workers_know_are_left_to_them() -> None:
    config = RunConfig(
        agent="theirs",
        agent_config={"whatever": 1},
        tools=("theirs",),
        tools_config={"theirs": {"whatever": 1}},
        reward="theirs",
        reward_config={"whatever": 1},
    )
    assert [sentence[:24] for sentence in find_unknown(config, plugins=())] == [
        "No agent is named 'their",
        "No tool is named 'theirs",
        "No reward is named 'thei",
    ]
