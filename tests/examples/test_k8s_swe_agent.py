"""The example with pods: against a fake of the Kubernetes API, whose pods really run commands."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_kubernetes import FakeKubernetes
from fixtures.sandboxes import require_kind

from workers.core.registry import get_agent_class
from workers.sandbox.kubernetes_pod import NETWORK_LABEL

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "k8s_swe_agent"


@pytest.fixture(autouse=True)
def _pods_can_run() -> None:
    require_kind("bubblewrap")


async def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, EXAMPLE / "k8s_swe_agent.py", *arguments),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(90):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_each_task_is_solved_in_a_pod_of_its_own_and_no_pod_is_left(tmp_path):
    async with FakeKubernetes() as fake:
        code, said = await run(
            tmp_path, "--namespace", "rollouts", KUBECONFIG=fake.kubeconfig(tmp_path)
        )
        assert code == 0, said
        assert "3 of 3 solved" in said
        assert "+++ b/shop/prices.py" in said
        assert len(set(fake.deleted)) == 2 * 3  # one for the work, one for the verdict
        assert not fake.pods
        assert set(fake.namespaces) == {"rollouts"}
        assert {spec["containers"][0]["image"] for spec in fake.specs} == {"python:3.12"}


async def test_without_a_cluster_the_local_sandbox_is_used_and_said(tmp_path):
    code, said = await run(tmp_path, KUBECONFIG=str(tmp_path / "nothing"))
    assert code == 0, said
    assert "in a sandbox of this machine" in said
    assert "3 of 3 solved" in said


async def test_a_cluster_that_is_asked_for_and_not_there_is_an_error(tmp_path):
    code, said = await run(tmp_path, "--sandbox", "k8s", KUBECONFIG=str(tmp_path / "nothing"))
    assert code == 1, said
    assert "no configuration of a cluster was found" in said
    assert "0 of 3 solved" in said


def test_the_tasks_are_a_dataset_of_the_pipeline():
    from producers.datasets import read_prompts
    from workers.agents.coding_task import CodingTask

    prompts = list(read_prompts(EXAMPLE / "tasks.jsonl"))
    assert len(prompts) == 3
    for prompt in prompts:
        task = CodingTask.from_prompt(prompt.payload, {})
        assert task.test_command
        assert task.test_files
    agent_class: Any = get_agent_class("swe")
    agent = agent_class(sandbox="k8s", image="python:3.12")
    assert agent.options_for({}) == {"image": "python:3.12"}


def test_the_permissions_name_what_the_sandbox_does():
    yaml = pytest.importorskip("yaml")
    role, policy = yaml.safe_load_all((EXAMPLE / "permissions.yaml").read_text())
    allowed = {rule["resources"][0]: set(rule["verbs"]) for rule in role["rules"]}
    assert allowed == {"pods": {"create", "get", "list", "delete"}, "pods/exec": {"get", "create"}}
    assert policy["spec"]["podSelector"]["matchLabels"] == {NETWORK_LABEL: "deny"}
