"""Hostile candidates through `rollout run --reward python_tests`: each earns 1 if it gets out."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from fixtures.command_line import CommandLine
from fixtures.sandboxes import require_confined
from fixtures.scripted_model import question_of, scripted_model

pytestmark = pytest.mark.timeout(240)

ATTACKS = {
    "kill everything": """
def kill_everything():
    import os
    os.kill(-1, 9)
    return 1
""",
    "read a private key": """
def read_a_private_key():
    import glob
    return int(any("PRIVATE" in open(path).read() for path in glob.glob("{home}/.ssh/*")))
""",
    "reach the network": """
def reach_the_network():
    import socket
    socket.create_connection(("127.0.0.1", {port}), 5).close()
    return 1
""",
    "find the tests": """
def find_the_tests():
    import glob
    return int(any(b"pytest" in open(path, "rb").read() for path in glob.glob("/proc/*/cmdline")))
""",
}


def row(name: str) -> dict[str, Any]:
    function = name.replace(" ", "_")
    return {
        "prompt": f"def {function}():\n",
        "entry_point": function,
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    }


def test_hostile_candidates_get_nowhere_and_the_worker_lives(
    rollout: CommandLine, folder: Path
) -> None:
    require_confined()
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_ed25519").write_text("PRIVATE KEY")
    (folder / "attacks.jsonl").write_text("".join(json.dumps(row(name)) + "\n" for name in ATTACKS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer(messages: Any) -> str:
            name = question_of(messages).removeprefix("def ").partition("(")[0].replace("_", " ")
            return ATTACKS[name].format(home=home, port=port)

        with scripted_model(answer) as model:
            shown = rollout.json(
                *("run", "attacks.jsonl", "--run", "hostile", "--reward", "python_tests"),
                *("--set", 'reward_config={"timeout_s": 5}', "-n", "2"),
                *("--base-url", model.base_url, "--workers", "1"),
                environment={"HOME": str(home)},
                timeout_s=180,
            )
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert shown["rollouts"]["succeeded"] == 2 * len(ATTACKS)
    assert shown["errors"] == {}
    assert shown["reward"]["mean"] == 0.0
