"""Reading a dataset takes the same memory whatever its length."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]

READER = textwrap.dedent(
    """
    import resource, sys
    from producers.datasets import read_prompts

    def peak_kib():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    small, large = sys.argv[1:]
    list_of_small = sum(1 for _ in read_prompts(small))
    before = peak_kib()
    bad = []
    count = sum(1 for _ in read_prompts(large, on_bad=bad.append))
    print(count, len(bad), peak_kib() - before)
    """
)


def peak_growth(small: Path, large: Path) -> tuple[int, int, int]:
    """Read both files in a fresh process; return rows and bad rows of `large`, and KiB grown."""
    done = subprocess.run(
        [sys.executable, "-c", READER, str(small), str(large)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    count, bad, grown = map(int, done.stdout.split())
    return count, bad, grown


def small_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.jsonl"
    file.write_text(json.dumps({"question": "q" * 300, "answer": "a" * 200}) + "\n")
    return file


def test_a_hundred_thousand_prompts_stream(tmp_path):
    large = tmp_path / "large.jsonl"
    with large.open("w") as out:
        for n in range(100_000):
            out.write(json.dumps({"question": f"{n}" + "q" * 300, "answer": "a" * 200}) + "\n")
    count, bad, grown = peak_growth(small_file(tmp_path), large)
    assert (count, bad) == (100_000, 0)
    assert grown < 16 * 1024


def test_a_line_of_a_hundred_megabytes_is_never_held(tmp_path):
    large = tmp_path / "large.jsonl"
    with large.open("wb") as out:
        out.write(b'{"prompt": "')
        for _ in range(100):
            out.write(b"x" * 2**20)
        out.write(b'"}\n{"prompt": "after"}\n')
    count, bad, grown = peak_growth(small_file(tmp_path), large)
    assert (count, bad) == (1, 1)
    assert grown < 60 * 1024
