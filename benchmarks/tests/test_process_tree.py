"""CPU of a tree, with its finished children."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.process_tree import ProcessMeter, read_processes

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[str]]:
    """A process that runs the Python code of each line it is sent in a child, and says `done`."""
    code = (
        "import subprocess, sys\n"
        "for line in sys.stdin:\n"
        "    subprocess.run([sys.executable, '-c', eval(line)], check=True)\n"
        "    print('done', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def run_child(tree: subprocess.Popen[str], code: str) -> None:
    assert tree.stdin is not None
    assert tree.stdout is not None
    tree.stdin.write(repr(code) + "\n")
    tree.stdin.flush()
    assert tree.stdout.readline() == "done\n"


def test_a_finished_child_is_counted(tree):
    meter = ProcessMeter({"tree": tree.pid})
    with meter.measuring() as used:
        run_child(tree, BURN)
    assert 0.28 <= used["tree"].cpu_s < 2.0


def test_only_the_block_is_counted(tree):
    run_child(tree, BURN)
    with ProcessMeter({"tree": tree.pid}).measuring() as used:
        pass
    assert used["tree"].cpu_s < 0.1


def test_a_child_that_is_an_own_root_is_not_counted_twice(tree):
    meter = ProcessMeter({"tests": os.getpid(), "tree": tree.pid})
    with meter.measuring() as used:
        run_child(tree, BURN)
    assert used["tree"].cpu_s >= 0.28
    assert used["tests"].cpu_s < 0.28


def test_memory_is_the_peak_of_the_largest_process(tree, tmp_path):
    end = tmp_path / "end"
    hold = (
        "import pathlib, time\n"
        "x = bytearray(80 << 20)\n"
        f"while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.05)"
    )
    meter = ProcessMeter({"tree": tree.pid})

    def end_when_seen() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            seen = meter.usage()["tree"]
            if min(seen.peak_process_rss_bytes, seen.peak_tree_pss_bytes) > 80 << 20:
                break
            time.sleep(0.05)
        end.touch()

    with meter.measuring() as used:
        ender = threading.Thread(target=end_when_seen)
        ender.start()
        run_child(tree, hold)
        ender.join()
    assert used["tree"].peak_process_rss_bytes > 80 << 20
    assert used["tree"].peak_tree_pss_bytes > 80 << 20


def test_a_root_that_does_not_exist_is_refused_by_name():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ValueError, match=f"postgres \\({gone.pid}\\)"):
        ProcessMeter({"postgres": gone.pid})


def test_this_process_is_in_the_list():
    found = {record.pid: record for record in read_processes()}
    assert found[os.getpid()].parent == os.getppid()
