import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.agentic_rollout import create_agentic_rollout

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = [
    "basic_usage.py",
    "advanced_integration.py",
    "test_agentic_rollout.py",
    "validation_tests.py",
    "test_coding_agent.py",
    "claude_integration/simple_claude_example.py",
    "config/run_config.py",
]

#: Run by tests of their own.
OTHERS = [
    "k8s_swe_agent/k8s_swe_agent.py",
    *(f"strands_math_agent/{name}.py" for name in ("basic_app", "rl_app")),
    "train_loop.py",
    "train_tiny_policy.py",
    *(f"tiny_policy/{name}.py" for name in ("plot", "server", "trainer", "warm_up")),
    "trajectory_client/browse.py",
]


def run(script: str, folder: Path, **variables: str) -> str:
    """Run an example as its reader does, from its own folder or another one."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_no_example_is_left_out():
    runnable = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert runnable == {*SCRIPTS, *OTHERS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs_offline_from_any_folder(script, tmp_path):
    output = run(script, tmp_path)
    assert "FAIL" not in output
    assert list(tmp_path.iterdir()) == []


def test_an_example_runs_from_its_own_folder():
    assert "Answer: 360" in run("basic_usage.py", EXAMPLES)


@pytest.mark.parametrize(
    "script", ["basic_usage.py", "advanced_integration.py", "config/run_config.py"]
)
def test_with_an_openai_key_the_endpoint_is_used(script, endpoint, tmp_path):
    output = run(
        script,
        tmp_path,
        OPENAI_API_KEY="a-key",
        OPENAI_BASE_URL=f"{endpoint.url}/v1",
        OPENAI_MODEL="a-model",
    )
    assert "from the endpoint" in output
    assert set(endpoint.paths) == {"/v1/chat/completions"}
    assert set(endpoint.keys) == {"a-key"}
    assert {body["model"] for body in endpoint.bodies} == {"a-model"}


@pytest.mark.parametrize("script", [SCRIPTS[0], "claude_integration/simple_claude_example.py"])
def test_with_an_anthropic_key_its_endpoint_is_used(script, endpoint, tmp_path):
    pytest.importorskip("anthropic")
    output = run(script, tmp_path, ANTHROPIC_API_KEY="a-key", ANTHROPIC_BASE_URL=endpoint.url)
    assert "from the endpoint" in output
    assert set(endpoint.paths) == {"/v1/messages"}
    assert set(endpoint.keys) == {"a-key"}


SCRIPT = """
import asyncio
from workers import AgenticRollout, AgenticRolloutConfig

async def main():
    rollout = AgenticRollout(AgenticRolloutConfig(agent_type="single_turn"))
    (trajectory,) = await rollout.run_batch(["2 + 2?"])
    print(trajectory.get_final_response())

for _ in range(2):
    asyncio.run(main())
"""


@pytest.mark.parametrize("provider", ["OPENAI", "ANTHROPIC"])
def test_a_client_of_the_environment_closes_its_sessions(provider, endpoint, tmp_path):
    if provider == "ANTHROPIC":
        pytest.importorskip("anthropic")
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            f"{provider}_API_KEY": "a-key",
            f"{provider}_BASE_URL": endpoint.url + ("/v1" if provider == "OPENAI" else ""),
            f"{provider}_MODEL": "a-model",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "from the endpoint" in finished.stdout, finished.stderr
    assert finished.stderr == ""


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "config").glob("*.json")), ids=lambda path: path.stem
)
def test_every_configuration_makes_a_rollout(path):
    config = json.loads(path.read_text())
    rollout = create_agentic_rollout(config)
    assert rollout.config.agent_type == config["agent_type"]
    assert set(rollout.tools) == set(config.get("tools_config", {}))
