"""`rollout rescore` from the command to the books, with a worker and a collector of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.deployment import AGENTS, Deployment
from fixtures.waiting import wait_until
from sqlalchemy import Engine

from rollout.app import run_command

JUDGE = """
from pathlib import Path
from workers.rewards.registry import register_reward

@register_reward("judge")
def judge(response: str, answer: str, folder: str = "") -> float:
    if not (Path(folder) / "judge is back").exists():
        raise ConnectionError("the judge is away")
    return float(answer in response)
"""


@pytest.fixture
def deployment(engine: Engine, broker_place: BrokerPlace, tmp_path: Path) -> Iterator[Deployment]:
    plugin = tmp_path / "judge_plugin.py"
    plugin.write_text(JUDGE)
    deployment = Deployment(
        engine, broker_place, tmp_path, worker={"plugins": [str(AGENTS), str(plugin)]}
    )
    yield deployment
    deployment.close()


@pytest.fixture
def cli(deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Any]:
    """Call the command line with the settings of the deployment."""
    settings = deployment.settings
    assert settings.database.url is not None
    assert settings.broker.url is not None
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", settings.database.url.get_secret_value())
    monkeypatch.setenv("ROLLOUT_BROKER__URL", settings.broker.url.get_secret_value())
    monkeypatch.setenv("ROLLOUT_BROKER__PREFIX", settings.broker.prefix)
    monkeypatch.setenv("ROLLOUT_DATA_DIR", str(settings.data_dir))
    if settings.aws.sqs_endpoint:
        monkeypatch.setenv("ROLLOUT_AWS__ENDPOINT_URL", settings.aws.sqs_endpoint)

    def call(*arguments: str) -> Any:
        capsys.readouterr()
        assert run_command([*arguments, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return call


def test_what_a_judge_missed_is_scored_when_it_is_back(deployment, cli):
    deployment.gate.touch()
    deployment.submit(3, n=2, reward="judge", reward_config={"folder": str(deployment.folder)})
    deployment.start_controller()
    deployment.start_worker()
    deployment.wait_states({"failed": 6})
    # Its first heartbeat may come later than what it has done.
    wait_until(lambda: deployment.rows("SELECT * FROM processes WHERE kind = 'worker'"))
    asked = {"run": "job", "reward": "judge"}
    counted = cli("rescore", "job", "--class", "reward_error", "--dry-run")
    assert counted == {**asked, "requested": 6, "dry_run": True}
    (deployment.folder / "judge is back").touch()
    shown = cli("rescore", "job")
    assert {name: shown[name] for name in counted} == counted | {"dry_run": False}
    assert (shown["scored"], shown["failed"]) == (6, 0)
    assert shown["scores"] == [{"name": "judge", "version": "1", "n": 6, "mean": 1.0}]
    deployment.wait_states({"succeeded": 6})
    assert cli("status", "job")["scores"] == shown["scores"]
    assert len(deployment.said("started")) == 6, "no agent ran again"
    wait_until(lambda: cli("status", "job")["groups"]["ready"] == 3, 10)
    sums = cli("status", "job")["accounting"]
    assert (sums["enqueued"], sums["ready"], sums["adds_up"]) == (3, 3, True)
