"""The proof that the pipeline trains: a smaller form of the example, with processes killed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 12
GROUPS, ROLLOUTS = 8, 8


@pytest.mark.parametrize(
    ("worse", "named"),
    [
        ({"mean_last5": 0.54}, "rose by 0.24"),
        ({"greedy_after": 0.74}, "greedy"),
        ({"rollouts_lost": 1}, "1 rollouts are lost"),
        ({"groups_twice": 2}, "2 groups were trained twice"),
    ],
)
def test_the_check_names_each_shortfall(
    monkeypatch: pytest.MonkeyPatch, worse: dict[str, float], named: str
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shortfalls = importlib.import_module("train_tiny_policy").shortfalls
    good = {"mean_first5": 0.3, "mean_last5": 0.8, "greedy_after": 0.9}
    good |= {"rollouts_lost": 0, "groups_twice": 0}
    assert shortfalls(good) == []
    (found,) = shortfalls(good | worse)
    assert named in found


# It takes 40 s on two quiet cores; other tests run beside it.
@pytest.mark.timeout(600)
def test_a_policy_learns_while_worker_and_trainer_are_killed(tmp_path: Path):
    saved, plot = tmp_path / "curves.jsonl", tmp_path / "plot.svg"
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / "train_tiny_policy.py"), "--json"),
            *("--steps", str(STEPS), "--save", str(saved)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == [
        *("greedy_before", "greedy_after", "mean_first5", "mean_last5"),
        *("steps", "seconds", "rollouts_lost", "groups_twice"),
    ]
    assert (result["steps"], result["rollouts_lost"], result["groups_twice"]) == (STEPS, 0, 0)
    assert result["greedy_before"] < 0.5
    assert result["mean_last5"] - result["mean_first5"] >= 0.1

    (curve,) = map(json.loads, saved.read_text().splitlines())
    killed = [(kill["process"], kill["step"]) for kill in curve["kills"]]
    assert killed == [("worker", STEPS // 4), ("trainer", STEPS // 2), ("trainer", STEPS * 3 // 4)]
    assert curve["attempts"] > STEPS * GROUPS * ROLLOUTS, "the killed worker had nothing under way"
    assert curve["trained_groups"] == curve["groups"]["consumed"] == STEPS * GROUPS

    drawing = [sys.executable, "-m", "tiny_policy.plot", str(saved), str(plot)]
    subprocess.run(drawing, check=True, env=os.environ | {"PYTHONPATH": str(EXAMPLES)})
    assert xml.etree.ElementTree.parse(plot).getroot().tag.endswith("svg")
