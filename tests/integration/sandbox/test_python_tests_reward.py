from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from fake_candidates import FAKES, WHOLE
from fixtures.sandboxes import Marked, children, require_own_pid_namespace
from function_problems import PROBLEMS, UNSHIFT, Problem
from honest_candidates import HONEST, TREE

from pipeline.contract.errors import SandboxError
from workers.rewards import python_tests as reward_module
from workers.rewards.python_tests import candidate_in, python_tests
from workers.rewards.registry import score
from workers.sandbox import kinds
from workers.sandbox.base import SandboxFailure

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("only_confined")]

ROW = {
    "prompt": (
        "from typing import List\n\n\n"
        "def largest(numbers: List[int]) -> int:\n"
        '    """Return the largest number.\n\n    >>> largest([1, 3, 2])\n    3\n    """\n'
    ),
    "entry_point": "largest",
    "test": (
        "def check(candidate):\n"
        "    assert candidate([1, 3, 2]) == 3\n"
        "    assert candidate([-5]) == -5, 'negative'\n"
        "    assert candidate(list(range(1000))) == 999\n"
    ),
}


def row(test: str, *, prompt: str = "def f(x):\n", entry_point: str = "f") -> dict[str, Any]:
    body = "".join(f"    {line}\n" for line in test.strip().splitlines())
    return {
        "prompt": prompt,
        "entry_point": entry_point,
        "test": f"def check(candidate):\n{body}",
    }


@pytest.mark.parametrize(
    "answer",
    [
        "    return max(numbers)\n",
        "return max(numbers)",
        "    best = -(10**9)\n    for n in numbers:\n        best = max(n, best)\n    return best",
        WHOLE,
        ROW["prompt"] + "    return max(numbers)\n",
        f"First:\n```python\ndef largest(n): return 0\n```\nBetter:\n```python\n{WHOLE}```\nDone.",
        f"```\n{WHOLE}```",
        f"~~~py\n{WHOLE}~~~",
        f"````python\n{WHOLE}\n````",
        f"It was cut short:\n```python\n{WHOLE}",
        "```python\n    return max(numbers)\n```",
        "    def largest(numbers):\n        return max(numbers)\n",
        "import functools\n\ndef largest(numbers):\n    return functools.reduce(max, numbers)",
        "largest = max",
        "def largest(n):\n    return max(n)\n\nif __name__ == '__main__':\n    1/0",
    ],
)
async def test_correct_candidate_passes_in_every_form(answer: str) -> None:
    assert await python_tests(answer, ROW) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot do this.",
        "    return min(numbers)\n",
        "    pass\n",
        "    return str(max(numbers))\n",
        "    return None",
        "```python\n```",
        "def other(numbers):\n    return max(numbers)",
        "def largest(numbers):\n    return max(numbers",
        "    raise ValueError",
        "    return largest(numbers)",
        "    import ctypes; ctypes.string_at(0)",
        "\0",
        "\ud800",
        "def largest(" * 3000,
        ROW["prompt"],
    ],
)
async def test_wrong_broken_or_crashing_candidate_fails(answer: str) -> None:
    assert await python_tests(answer, ROW) == 0.0


@pytest.mark.parametrize("name", FAKES)
async def test_pass_cannot_be_faked(name: str) -> None:
    begun = time.monotonic()
    assert await python_tests(FAKES[name], ROW, timeout_s=1.0) == 0.0
    assert time.monotonic() - begun < 15


async def test_fake_is_found_out_even_if_the_test_catches_everything() -> None:
    """A test that swallows every exception must not swallow the end of the candidate."""
    test = row("try:\n    candidate(1)\nexcept:\n    pass")
    assert await python_tests("def f(x): raise ValueError", test) == 1.0
    assert await python_tests("import os\ndef f(x): os._exit(0)", test) == 0.0


@pytest.mark.parametrize(("answer", "test"), HONEST)
async def test_honest_candidate_passes_whatever_it_returns(answer: str, test: str) -> None:
    assert await python_tests(answer, row(test, prompt=TREE)) == 1.0


async def test_method_and_class_can_be_the_entry_point() -> None:
    solution = "class Solution:\n    def twice(self, x):\n        return 2 * x\n"
    test = row(
        "assert candidate(4) == 8", prompt="class Solution:\n", entry_point="Solution().twice"
    )
    assert await python_tests(solution, test) == 1.0
    stack = "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n    def size(self): return len(self.x)\n"  # noqa: E501
    test = row("s = candidate()\ns.push(1)\nassert s.size() == 1", prompt="#", entry_point="Stack")
    assert await python_tests(stack, test) == 1.0


async def test_helpers_of_the_prompt_are_pristine_in_the_tests() -> None:
    test = row("assert helper(candidate(1)) == 4", prompt=TREE)
    assert await python_tests("def f(x): return 2", test) == 1.0
    assert await python_tests("def helper(x): return 4\ndef f(x): return 0", test) == 0.0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"test": "def check(candidate:"}, "cannot be executed"),
        ({"test": "x = 1"}, "no function check"),
        ({"test": "import no_such_module\ndef check(c): pass"}, "no_such_module"),
        ({"test": ""}, "'test'"),
        ({"entry_point": None}, "'entry_point'"),
        ({"prompt": 3}, "'prompt'"),
    ],
)
async def test_row_that_cannot_be_scored_is_an_error_not_a_zero(
    broken: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        await python_tests("return 1", ROW | broken)


async def test_sandbox_that_does_not_start_is_an_error_not_a_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise SandboxFailure("no namespaces left")

    with monkeypatch.context() as patched:
        patched.setattr(reward_module, "open_sandbox", fail)
        with pytest.raises(SandboxFailure):
            await python_tests(WHOLE, ROW)
    monkeypatch.setattr(reward_module, "_PYTHON", ("no-such-python",))
    with pytest.raises(SandboxFailure, match="did not start"):
        await python_tests(WHOLE, ROW)


async def test_process_sandbox_gives_the_same_verdicts() -> None:
    require_own_pid_namespace()
    assert await python_tests(WHOLE, ROW, sandbox="process") == 1.0
    for name in ("exit 0 in the call", "equal to everything", "prints verdicts", "waits for ever"):
        assert await python_tests(FAKES[name], ROW, timeout_s=0.5, sandbox="process") == 0.0


@pytest.mark.skipif(os.geteuid() == 0, reason="root has users of its own for candidates")
async def test_candidate_that_nothing_would_confine_is_refused_and_earns_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kinds, "_obstacles", {})
    with pytest.raises(SandboxError, match="refused"):
        await score("python_tests", response=WHOLE, prompt=ROW, config={})


async def test_registry_scores_by_name() -> None:
    result = await score("python_tests", response=WHOLE, prompt=ROW, config={"timeout_s": 5.0})
    assert result.value == 1.0


async def test_many_candidates_in_parallel_leave_no_process_file_or_descriptor(
    mark: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    good = f"# {mark}\n{WHOLE}"
    # Each kind once, and one loop only: it uses two seconds of a processor.
    bad = [
        *([f"def largest(n):\n    return 0  # {mark}"] * 11),
        f"import os  # {mark}\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        while True: os.read(os.open('/dev/zero', 0), 1)\nos._exit(0)",
        f"def largest(n):\n    while True: pass  # {mark}",
    ]
    await python_tests(WHOLE, ROW)
    gc.collect()
    descriptors, before = len(os.listdir("/proc/self/fd")), children()
    answers = [bad[number // 5 % len(bad)] if number % 5 == 4 else good for number in range(65)]
    rewards = await asyncio.gather(*(python_tests(a, ROW, timeout_s=2.0) for a in answers))
    assert rewards == [0.0 if number % 5 == 4 else 1.0 for number in range(65)]
    await mark.wait_gone()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert children() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no fence", "no fence"),
        ("```\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("```python\n'''\n``` inside\n'''\n```", "'''\n``` inside\n'''\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("``` \nopen", "open\n"),
    ],
)
def test_last_fenced_block_is_the_candidate(text: str, code: str) -> None:
    assert candidate_in(text, "f") == code


#: Blocks that a model writes after its function.
AFTER = (
    "You use it like this:\n```python\nprint({name}([1, 2]))\n```",
    "It prints:\n```\n3\n```",
    "```python\nprint({name}(2))\n```\nwhich prints\n```text\n2\n```\n",
    "```python\nassert {name}([1]) == 1\n```",
    "```bash\npython {name}.py\n```",
    "```python\n{name} == max\n```",
)


async def rewards_of(candidates: list[tuple[Problem, str]]) -> list[tuple[str, str, float]]:
    """Score candidates in parallel: entry point, answer and reward of each."""
    rewards = await asyncio.gather(*(python_tests(code, each.row) for each, code in candidates))
    return [
        (each.entry_point, code, reward)
        for (each, code), reward in zip(candidates, rewards, strict=True)
    ]


async def test_canonical_solutions_pass_also_with_blocks_after_them() -> None:
    candidates = [(each, each.solution) for each in PROBLEMS]
    for each, after in zip(PROBLEMS, AFTER, strict=True):
        whole = f"```python\n{each.prompt}{each.solution}```\n"
        candidates.append((each, whole + after.format(name=each.entry_point)))
    assert [scored for scored in await rewards_of(candidates) if scored[2] != 1.0] == []


async def test_equivalent_mutants_pass() -> None:
    mutants = [(each, code) for each in PROBLEMS for code in each.mutants(each.equivalent)]
    assert [scored for scored in await rewards_of(mutants) if scored[2] != 1.0] == []


async def test_wrong_mutants_fail() -> None:
    mutants = [(each, code) for each in PROBLEMS for code in each.mutants(each.wrong)]
    assert [scored for scored in await rewards_of(mutants) if scored[2] != 0.0] == []


async def test_a_mutant_of_the_prompts_helper_fails_although_it_inverts_itself() -> None:
    """The task is to invert the helper that the prompt gives, and the tests use that one."""
    head, found, body = (UNSHIFT.prompt + UNSHIFT.solution).partition("group[1:] + group[:1]")
    assert found
    turned = f"{head}group[-1:] + group[:-1]{body}"
    same = f"{head}(group + group)[1:4]{body}"
    assert [reward for *_, reward in await rewards_of([(UNSHIFT, turned), (UNSHIFT, same)])] == [
        0.0,
        1.0,
    ]


@pytest.mark.parametrize(
    "definition",
    ["def f(x):\n    return 1\n", "async def f(x): ...\n", "class f:\n    pass\n", "f = int\n",
     "    def f(self): ...\n"],
)  # fmt: skip
def test_the_last_definition_is_the_candidate(definition: str) -> None:
    first = "```\ndef f(x): return 0\n```\n"
    assert candidate_in(f"{first}```\n{definition}```\n```\nf(1)\n```", "f") == definition
