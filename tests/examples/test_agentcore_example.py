"""The toolkit document's snippets, and the example agent that its migration guide leads to.

The document imports `agentcore_rl_toolkit`; here that name is our package. The model is scripted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.agentcore_apps import SESSION, TRAINING, Recorder, Served, own_logging
from fixtures.scripted_model import call_tool, scripted_model
from starlette.testclient import TestClient

import workers.agentcore

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "strands_math_agent"
SCRIPT = ROOT / "scripts" / "build_docker_image_and_push_to_ecr.sh"
DOCKERFILE = EXAMPLE / ".bedrock_agentcore" / "strands_math_agent_rl" / "Dockerfile"

__all__ = ["own_logging"]

BASIC = '''
from bedrock_agentcore.runtime import BedrockAgentCoreApp
from dotenv import load_dotenv
from strands import Agent
from strands.models import BedrockModel
from strands_tools import calculator

app = BedrockAgentCoreApp()

load_dotenv()

model = BedrockModel(model_id="us.anthropic.claude-sonnet-4-20250514-v1:0")

agent = Agent(
    model=model,
    tools=[calculator],
    system_prompt=(
        "Your task is to solve the math problem. "
        + "Use calculator when applicable. "
        + 'Let\\'s think step by step and output the final answer after "####".'
    ),
)


@app.entrypoint
async def invoke_agent(payload):
    """
    Invoke the agent with a payload
    """
    user_input = payload.get("prompt")

    print("User input:", user_input)

    response = await agent.invoke_async(user_input)

    return response.message["content"][0]["text"]


if __name__ == "__main__":
    app.run()
'''

#: The diffs of the migration guide, applied to the snippet above.
STEPS = (
    (
        "from bedrock_agentcore.runtime import BedrockAgentCoreApp\n",
        "from agentcore_rl_toolkit import StrandsAgentCoreRLApp\n"
        "from agentcore_rl_toolkit import StrandsRolloutCollector\n"
        "from reward import GSM8KReward\n",
    ),
    ("from strands.models import BedrockModel\n", ""),
    ("app = BedrockAgentCoreApp()\n", "app = StrandsAgentCoreRLApp()\n"),
    (
        'model = BedrockModel(model_id="us.anthropic.claude-sonnet-4-20250514-v1:0")\n',
        "model = app.create_openai_compatible_model()\n"
        "rollout_collector = StrandsRolloutCollector()\n",
    ),
    ("    ),\n)\n", "    ),\n    hooks=[rollout_collector],\n)\nreward_fn = GSM8KReward()\n"),
    ("@app.entrypoint\n", "@app.rollout_entrypoint\n"),
    ('    user_input = payload.get("prompt")\n', '    user_input = payload.get("prompt")\n'
     '    answer = payload["answer"]\n'),
    (
        '    return response.message["content"][0]["text"]\n',
        "    rollout_data = rollout_collector.get_rollout_data()\n"
        '    rewards = reward_fn(response_text=response.message["content"][0]["text"], '
        "ground_truth=answer)\n"
        '    return {"rollout_data": rollout_data, "rewards": rewards}\n',
    ),
)  # fmt: skip


def policy(messages):
    """Use the calculator once, then answer."""
    if messages[-1]["role"] == "tool":
        return "It is #### 42"
    return call_tool("calculator", {"expression": "6*7"})


@pytest.fixture
def model(monkeypatch):
    with scripted_model(policy) as scripted:
        monkeypatch.setenv("BASE_URL", scripted.base_url)
        monkeypatch.setenv("MODEL_ID", "scripted")
        monkeypatch.setenv("STRANDS_TOOL_CONSOLE_MODE", "disabled")
        yield scripted


@pytest.fixture
def toolkit(monkeypatch):
    """The document's names: our package, and the example's modules."""
    monkeypatch.setitem(sys.modules, "agentcore_rl_toolkit", workers.agentcore)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in ("reward", "rl_app", "basic_app"):
        sys.modules.pop(name, None)


def test_the_documents_agent_runs_as_it_is_written(model, toolkit, monkeypatch):
    def hosted(model_id):
        assert model_id.startswith("us.anthropic.")
        return workers.agentcore.StrandsAgentCoreRLApp().create_openai_compatible_model()

    monkeypatch.setattr("strands.models.BedrockModel", hosted)
    names = {"__name__": "snippet"}
    exec(compile(BASIC, "basic_app", "exec"), names)
    with TestClient(names["app"]) as client:  # pyright: ignore
        reply = client.post("/invocations", json={"prompt": "6*7?"})
        assert reply.json() == "It is #### 42"
        assert client.get("/ping").json()["status"] == "Healthy"


def test_the_documents_migration_makes_a_rollout_worker_of_it(model, toolkit):
    source = BASIC
    for before, after in STEPS:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    names = {"__name__": "snippet"}
    exec(compile(source, "rl_app", "exec"), names)
    check_rollout(names["app"])


def check_rollout(app):
    """Invoke an app that has its entrypoint already, and look at what it saves."""
    saved = Recorder()
    app.s3_client = app.sqs_client = saved
    with TestClient(app) as client:
        result = Served(app, client, saved).result(
            {"prompt": "6*7?", "answer": "#### 42", "_training": TRAINING}
        )
    assert result["status_code"] == 200, result
    assert result["rewards"] == 1.0
    assert [turn["turn_id"] for turn in result["rollout_data"]] == [0, 1]
    assert saved.objects[0]["Key"] == f"exp/in_{SESSION}.json"


def test_the_example_is_that_rollout_worker(model, toolkit):
    import rl_app  # pyright: ignore

    check_rollout(rl_app.app)


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("so #### 42", "6*7 #### 42", 1.0),
        ("#### $1,042.00", "#### 1042", 1.0),
        ("the answer is 42", "#### 42", 1.0),
        ("#### 41", "#### 42", 0.0),
        ("I do not know", "#### 42", 0.0),
        ("#### -3", "#### 3", 0.0),
    ],
)
def test_the_reward_compares_final_numbers(toolkit, text, gold, reward):
    from reward import GSM8KReward  # pyright: ignore

    assert GSM8KReward()(response_text=text, ground_truth=gold) == reward


def build(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "ECR"))}
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_build_script_says_what_it_would_run():
    known = {"AWS_REGION": "us-west-2", "AWS_ACCOUNT": "123456789012", "ECR_REPO_NAME": "agents"}
    done = build(f"--dockerfile={DOCKERFILE}", "--tag=latest", "--dry-run", **known)
    assert done.returncode == 0, done.stderr
    image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/agents:latest"
    commands = done.stdout.splitlines()
    assert commands[0].startswith("docker buildx build --platform linux/arm64")
    assert commands[-2].split() == ["docker", "push", image]
    assert commands[-1] == image


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--dockerfile"),
        (("--dockerfile=x",), "--tag"),
        (("--dockerfile=x", "--tag=t"), "no Dockerfile"),
        ((f"--dockerfile={DOCKERFILE}", "--tag=t"), "is not set"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_the_build_script_names_what_is_missing(arguments, words):
    done = build(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_image_has_what_the_agent_imports():
    text = DOCKERFILE.read_text()
    for folder in re.findall(r"^COPY (\S+) /src/", text, re.MULTILINE):
        assert (ROOT / folder).is_dir()
    assert "--no-deps" in text, "no Celery and no database driver in the container"
    assert (EXAMPLE / "rl_app.py").is_file()
