import asyncio
import subprocess

import pytest
from fixtures.scripted_coder import ScriptedCoder

from workers.agents.coding_agent import CodingAgent
from workers.agents.swe_agent import SWEAgent
from workers.core.tools_config import create_tools
from workers.core.trajectory import StepType, Trajectory
from workers.sandbox.base import SandboxFailure
from workers.sandbox.shared import SHARED

FILES = {
    "shop/__init__.py": "",
    "shop/prices.py": "def total(prices):\n    return sum(prices) + 1\n",
    "tests/__init__.py": "",
    "tests/test_prices.py": (
        "import unittest\n\nfrom shop.prices import total\n\n\n"
        "class Prices(unittest.TestCase):\n"
        "    def test_total(self):\n        self.assertEqual(total([1, 2]), 3)\n"
    ),
}
TEST_COMMAND = "python3 -m unittest discover -s tests -t ."
TASK = {"content": "total() is off by one.", "files": FILES, "test_command": TEST_COMMAND}

LOOK = ("file_editor", {"command": "view", "path": "shop/prices.py"})
FIX = (
    "file_editor",
    {"command": "str_replace", "path": "shop/prices.py", "old_str": " + 1", "new_str": ""},
)
WRONG = (
    "file_editor",
    {"command": "str_replace", "path": "shop/prices.py", "old_str": "+ 1", "new_str": "+ 1 + 0"},
)
TEST = ("bash_executor", {"command": TEST_COMMAND})
FINISH = ("finish", {"answer": "Removed the extra 1."})


def results(trajectory: Trajectory) -> list[str]:
    return [s.content for s in trajectory.steps if s.step_type is StepType.ACTION_RESULT]


@pytest.fixture(autouse=True)
def _no_sandbox_is_left_open():
    yield
    assert SHARED._shares == {}


async def test_a_coding_task_end_to_end():
    model = ScriptedCoder(TEST, LOOK, FIX, TEST, FINISH)
    trajectory = await CodingAgent().run_trajectory(TASK, model, "r1")
    assert trajectory.metadata["stop_reason"] == "answered"
    assert trajectory.get_final_response() == "Removed the extra 1."
    assert trajectory.metadata["tests"]["passed"] is True
    assert trajectory.final_reward == 1.0
    assert trajectory.metadata["phases"] == [
        "understanding",
        "testing",
        "implementation",
        "testing",
    ]
    diff = trajectory.metadata["diff"]
    assert "-    return sum(prices) + 1\n+    return sum(prices)\n" in diff
    assert "pyc" not in diff
    assert TEST_COMMAND in model.requests[0][0]["content"]


async def test_the_swe_agents_answer_is_the_diff_and_it_applies(tmp_path):
    create = ("file_editor", {"command": "create", "path": "notes/new.txt", "file_text": "n\n"})
    commit = ("bash_executor", {"command": "git add -A && git commit -qm mine"})
    trajectory = await SWEAgent().run_trajectory(
        TASK, ScriptedCoder(FIX, create, TEST, commit, FINISH), "r1"
    )
    diff = trajectory.get_final_response()
    assert trajectory.metadata["summary"] == "Removed the extra 1."
    assert trajectory.final_reward == 1.0
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply"], cwd=tmp_path, input=diff, text=True, check=True)
    fixed = "def total(prices):\n    return sum(prices)\n"
    assert (tmp_path / "shop/prices.py").read_text() == fixed
    assert (tmp_path / "notes/new.txt").read_text() == "n\n"


async def test_work_that_fails_the_tests_is_rewarded_with_zero():
    trajectory = await SWEAgent().run_trajectory(TASK, ScriptedCoder(FINISH), "r1")
    assert trajectory.final_reward == 0.0
    assert trajectory.metadata["tests"]["exit_code"] == 1
    assert trajectory.get_final_response() == ""


async def test_a_task_without_tests_is_not_rewarded():
    task = {"content": "Fix it.", "files": FILES}
    trajectory = await SWEAgent().run_trajectory(task, ScriptedCoder(FIX), "r1")
    assert trajectory.final_reward is None
    assert "tests" not in trajectory.metadata


async def test_tests_that_never_end_have_failed():
    task = {**TASK, "test_command": "sleep 60", "test_timeout_s": 0.5}
    trajectory = await SWEAgent().run_trajectory(task, ScriptedCoder(FINISH), "r1")
    assert trajectory.final_reward == 0.0
    assert trajectory.metadata["tests"]["timed_out"] is True


#: The test expects what the wrong code gives. From Python 3.12 on, a file without tests fails.
FAKE = "bash_executor", {"command": "sed -i 's/, 3)/, 4)/' tests/test_prices.py"}


@pytest.mark.parametrize(
    "protection",
    [
        {},
        {
            "allow_paths": ["*"],
            "test_files": {"tests/test_prices.py": FILES["tests/test_prices.py"]},
        },
        {"allow_paths": ["*"], "restored_paths": ["tests"]},
    ],
    ids=["by default", "test_files", "restored_paths"],
)
async def test_rewritten_tests_do_not_count(protection):
    allowed = {**TASK, "allow_paths": ["tests/*"]}
    fooled = await SWEAgent().run_trajectory(allowed, ScriptedCoder(FAKE, FINISH), "r1")
    judged = await SWEAgent().run_trajectory(
        {**TASK, **protection}, ScriptedCoder(FAKE, FINISH), "r2"
    )
    assert (fooled.final_reward, judged.final_reward) == (1.0, 0.0)
    assert judged.metadata["tests"]["left_out"] == ["tests/test_prices.py"]


async def test_a_destroyed_repository_is_an_empty_diff_and_no_error():
    destroy = ("bash_executor", {"command": "rm -rf .git"})
    task = {**TASK, "restored_paths": ["tests"]}
    trajectory = await SWEAgent().run_trajectory(task, ScriptedCoder(FIX, destroy, FINISH), "r1")
    assert trajectory.get_final_response() == ""
    assert trajectory.final_reward == 0.0


async def test_a_repository_is_copied_and_the_original_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    task = {"content": "q", "repository": str(tmp_path), "test_command": "grep -q two a.txt"}
    edit = ("bash_executor", {"command": "echo two > a.txt"})
    trajectory = await SWEAgent().run_trajectory(task, ScriptedCoder(edit, FINISH), "r1")
    assert trajectory.final_reward == 1.0
    assert (tmp_path / "a.txt").read_text() == "one\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


async def test_what_the_setup_does_is_not_in_the_diff():
    task = {**TASK, "setup_command": "echo installed > setup.log"}
    trajectory = await SWEAgent().run_trajectory(task, ScriptedCoder(FIX, FINISH), "r1")
    assert "setup.log" not in trajectory.get_final_response()
    assert "sum(prices)" in trajectory.get_final_response()


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        ({"repository": "/nowhere/at/all"}, SandboxFailure, "repository cannot be read"),
        ({"repository": "/etc"}, SandboxFailure, "directory of the system"),
        ({"setup_command": "exit 3"}, SandboxFailure, "run the setup command"),
        ({"files": {"../out.txt": "x"}}, SandboxFailure, "could not be written"),
        ({"files": ["a"]}, ValueError, "the task's files is wrong: Input should be a valid"),
        (
            {"files": {"a": 1}},
            ValueError,
            "the task's files.a is wrong: Input should be a valid string",
        ),
        (
            {"test_command": ["pytest"]},
            ValueError,
            "the task's test_command is wrong: Input should be",
        ),
        ({"image": "python:3.12"}, ValueError, "set the agent's option sandbox"),
    ],
)
async def test_a_task_that_cannot_be_set_up_is_an_error_and_no_reward(task, error, words):
    kept = Trajectory("r1")
    with pytest.raises(error, match=words):
        await SWEAgent().run_trajectory(
            {"content": "q", **task}, ScriptedCoder(), "r1", trajectory=kept
        )
    assert kept.final_reward is None
    assert [step.content for step in kept.steps] == ["q"]


def test_a_container_needs_an_image():
    with pytest.raises(ValueError, match="needs an image"):
        SWEAgent(sandbox="k8s").options_for({})
    agent = SWEAgent(image="a:1", repository_path="/testbed", sandbox_options={"pull": True})
    assert (agent.sandbox, agent.working_directory) == ("docker", "/testbed")
    assert agent.options_for({"image": "b:2"}) == {"pull": True, "image": "b:2"}


async def test_no_more_files_are_shown_than_allowed():
    other = ("file_editor", {"command": "view", "path": "tests/test_prices.py"})
    model = ScriptedCoder(LOOK, LOOK, other, FINISH)
    trajectory = await CodingAgent(max_files_to_explore=1).run_trajectory(TASK, model, "r1")
    shown = results(trajectory)
    assert "def total" in shown[0]
    assert "def total" in shown[1]
    assert "not shown: 1 files" in shown[2]


async def test_no_more_attempts_are_made_than_allowed():
    model = ScriptedCoder(WRONG, TEST, WRONG, TEST, FIX, FINISH)
    agent = CodingAgent(max_implementation_attempts=2)
    trajectory = await agent.run_trajectory(TASK, model, "r1")
    assert "not edited: the tests failed after 2 attempts" in results(trajectory)[4]
    assert trajectory.final_reward == 0.0
    assert trajectory.metadata["phases"][-2:] == ["refinement", "testing"]


async def test_a_working_directory_is_shared_and_kept(tmp_path):
    agent = CodingAgent(working_directory=str(tmp_path))
    write = ("bash_executor", {"command": "echo hi > made.txt"})
    look = ("file_editor", {"command": "view", "path": "made.txt"})
    await agent.run_trajectory({"content": "q"}, ScriptedCoder(write), "r1")
    second = await agent.run_trajectory({"content": "q"}, ScriptedCoder(look), "r2")
    assert "hi" in results(second)[0]
    assert (tmp_path / "made.txt").read_text() == "hi\n"
    assert not (tmp_path / ".git").exists()


async def test_the_text_protocol_is_spoken_too():
    replies = iter(
        [
            "Thought: look\nAction: file_editor(command='view', path='shop/prices.py')",
            "Thought: fix\nAction: file_editor(command='create', path='shop/prices.py', "
            "file_text='def total(prices):\n    return sum(prices)\n')",
            "Thought: done\nAction: finish(answer='fixed')",
        ]
    )

    async def model(messages, **options):
        assert "tools" not in options
        return next(replies)

    trajectory = await SWEAgent(native_tools=False).run_trajectory(TASK, model, "r1")
    assert trajectory.final_reward == 1.0


async def test_tools_with_a_place_of_their_own_keep_it(tmp_path):
    (tmp_path / "own.txt").write_text("own")
    agent = CodingAgent()
    agent.set_tools(create_tools({"file_editor": {"root": str(tmp_path)}}))
    look = ("file_editor", {"command": "view", "path": "own.txt"})
    trajectory = await agent.run_trajectory(TASK, ScriptedCoder(look), "r1")
    assert "own" in results(trajectory)[0]


async def test_a_failing_model_leaves_the_partial_trajectory_and_no_sandbox():
    kept = Trajectory("r1")
    model = ScriptedCoder(LOOK, ConnectionError("away"))
    with pytest.raises(ConnectionError):
        await SWEAgent().run_trajectory(TASK, model, "r1", trajectory=kept)
    assert len(results(kept)) == 1
    assert kept.final_reward is None


async def test_many_tasks_at_once_do_not_meet():
    agent = SWEAgent()

    async def solve(number: int) -> Trajectory:
        files = {"n.txt": f"{number}\n"}
        edit = ("bash_executor", {"command": "echo solved >> n.txt"})
        calls = (edit, FINISH) if number % 2 else (FINISH,)
        check = f"grep -qx {number} n.txt && grep -q solved n.txt"
        task = {"content": "q", "files": files, "test_command": check}
        return await agent.run_trajectory(task, ScriptedCoder(*calls), f"r{number}")

    trajectories = await asyncio.gather(*(solve(number) for number in range(20)))
    assert [t.final_reward for t in trajectories] == [float(number % 2) for number in range(20)]
