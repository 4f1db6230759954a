"""Attempts in processes of their own: their results, their deaths, their limits, their end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.messages import request_of
from fixtures.offline_policy import serving
from fixtures.waiting import wait_until

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import Completion, RolloutRequest, parse_message
from pipeline.contract.trajectory import unpack_record
from pipeline.limits.settings import LimitSettings
from pipeline.limits.store import LimitStore
from pipeline.settings import Settings
from workers.core.registry import clear_registry
from workers.llm.connections import close_connections
from workers.process import isolated_child
from workers.process.execution import execute
from workers.process.plugins import load_plugins
from workers.process.runtime import Runtime
from workers.rewards.registry import clear_rewards

PLUGIN = Path(__file__).with_name("deadly_agents.py")

MakeRuntime = Callable[..., Runtime]


@pytest.fixture
async def make_runtime(make_settings: Callable[..., Settings]) -> AsyncIterator[MakeRuntime]:
    """Make the runtime of a worker that knows the deadly agents."""
    runtimes: list[Runtime] = []

    def make(**sections: Any) -> Runtime:
        worker = {"plugins": [str(PLUGIN)], **sections.pop("worker", {})}
        llm = {"base_url": "http://127.0.0.1:9/v1", **sections.pop("llm", {})}
        settings = make_settings(worker=worker, llm=llm, **sections)
        load_plugins(settings.worker.plugins)
        runtimes.append(Runtime(settings, "w1", isolates=True))
        return runtimes[-1]

    yield make
    for runtime in runtimes:
        assert runtime.isolation is not None
        runtime.isolation.close()
    await close_connections()
    clear_registry()
    clear_rewards()
    sys.modules.pop("rollout_plugin_deadly_agents", None)


def asked(deed: str = "", index: int = 0, **fields: Any) -> RolloutRequest:
    """Return the request of a rollout that was lost twice."""
    prompt = {"prompt": "What is 6 * 7?", "deed": deed, **fields.pop("prompt", {})}
    values = {"agent": "doer", "prompt": prompt, "lost_count": 2, **fields}
    return request_of(index, **values)


async def pid_of(runtime: Runtime, request: RolloutRequest) -> int:
    """Run an attempt of an agent that answers with its pid."""
    completion = await execute(request, runtime)
    assert completion.outcome == "succeeded", completion.error
    return int(unpack_record(completion.body, completion.codec).messages[-1]["content"])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition, 30.0)


async def started(folder: Path) -> list[int]:
    """Wait until a sleeping agent runs; return the pids of its process and of its command."""
    await until((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


async def test_a_rollout_runs_in_its_worker_until_its_second_loss(make_runtime) -> None:
    runtime = make_runtime()
    for lost_count in (0, 1):
        assert await pid_of(runtime, asked(lost_count=lost_count)) == os.getpid()
    first = await pid_of(runtime, asked(lost_count=2))
    second = await pid_of(runtime, asked(lost_count=3))
    assert len({first, second, os.getpid()}) == 3


def test_a_request_of_the_version_before_is_not_isolated() -> None:
    old = request_of().model_dump_json(exclude={"lost_count"})
    assert parse_message(RolloutRequest, old).lost_count == 0
    assert "lost_count" not in request_of().model_dump_json(exclude_defaults=True)


async def test_while_the_slots_are_full_a_rollout_runs_in_its_worker(make_runtime, tmp_path):
    runtime = make_runtime(worker={"isolated_slots": 1})
    task = asyncio.create_task(execute(asked("sleep", prompt={"folder": str(tmp_path)}), runtime))
    await started(tmp_path)
    assert await pid_of(runtime, asked(index=1)) == os.getpid()
    # One that was lost again and again may be what kills workers: it waits for the slot.
    waiting = asyncio.create_task(pid_of(runtime, asked(index=2, lost_count=5)))
    await asyncio.sleep(0)
    assert len(runtime.in_flight.beats()) == 2
    task.cancel()
    assert await waiting != os.getpid()


async def test_without_slots_every_rollout_runs_in_its_worker(make_runtime) -> None:
    runtime = make_runtime(worker={"isolated_slots": 0})
    assert await pid_of(runtime, asked(lost_count=9)) == os.getpid()


async def test_a_server_that_does_not_start_leaves_rollouts_to_the_worker(
    make_runtime, tmp_path
) -> None:
    plugin = tmp_path / "only_here.py"
    plugin.write_text(f"import os\nassert os.getpid() == {os.getpid()}\n")
    runtime = make_runtime(worker={"plugins": [str(PLUGIN), str(plugin)]})
    assert await pid_of(runtime, asked()) == os.getpid()


async def test_a_plugin_with_a_thread_is_loaded_by_each_process(make_runtime, tmp_path) -> None:
    plugin = tmp_path / "with_thread.py"
    plugin.write_text(
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "from workers.core.registry import register_agent\n"
        "LOADED_BY = os.getpid()\n"
        "@register_agent('loader')\n"
        "async def loader(prompt, llm):\n"
        "    return str(LOADED_BY == os.getpid())\n"
    )
    runtime = make_runtime(worker={"plugins": [str(PLUGIN), str(plugin)]})
    completion = await execute(asked(agent="loader"), runtime)
    assert unpack_record(completion.body, completion.codec).messages[-1]["content"] == "True"
    sys.modules.pop("rollout_plugin_with_thread", None)


async def test_the_result_equals_that_of_a_run_in_the_worker(make_runtime) -> None:
    async with serving() as (base_url, _):
        runtime = make_runtime(llm={"base_url": base_url})
        fields = {
            "agent": "react",
            "tools": ("calculator",),
            "reward": "numeric",
            "tokens": "required",
            "prompt": {"prompt": "What is 6 * 7?", "answer": "42"},
        }
        here = await execute(asked(lost_count=0, **fields), runtime)
        there = await execute(asked(lost_count=2, **fields), runtime)
    assert runtime.isolation is not None
    assert comparable(here) == comparable(there)
    assert here.tokens == there.tokens != b""
    assert there.prompt_tokens > 0
    assert there.reward_parts
    # Both were counted by the worker.
    (activity,) = runtime.activity.snapshot()
    assert activity.endpoints[0].count == 2 * there.n_turns
    assert all(tool.count % 2 == 0 for tool in activity.tools.values())


def comparable(completion: Completion) -> dict[str, Any]:
    """Return what must be equal: all but durations."""
    record = unpack_record(completion.body, completion.codec).model_dump(mode="json")
    values = completion.model_dump(mode="json", exclude={"timings", "body_bytes", "body_digest"})
    for part in values["reward_parts"]:
        part["latency_ms"] = 0.0
    return {"completion": values, "record": without_times(record)}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_times(each)
            for key, each in value.items()
            if not any(
                word in key for word in ("time", "latency", "duration", "elapsed", "response_id")
            )
        }
    return [without_times(each) for each in value] if isinstance(value, list) else value


async def test_its_calls_count_under_the_limits_that_all_workers_share(
    make_runtime, redis_place
) -> None:
    async with serving() as (base_url, _):
        broker = redis_place.overrides()["broker"]
        runtime = make_runtime(llm={"base_url": base_url, "model": "m"}, broker=broker)
        settings = runtime.settings
        assert settings.limits_redis_url is not None
        store = LimitStore.connect(settings.limits_redis_url, prefix=settings.limits_prefix)
        await store.set(base_url, "m", LimitSettings(max_concurrency=4))
        completion = await execute(asked(agent="single_turn"), runtime)
        (status,) = await store.show()
        await store.close()
    assert completion.outcome == "succeeded", completion.error
    assert (status.granted, status.in_flight) == (completion.n_turns, 0)


async def test_an_ordinary_error_is_the_same_error(make_runtime) -> None:
    completion = await execute(asked("raise"), make_runtime())
    assert completion.error is not None
    assert (completion.error.error_class, completion.error.code) == (
        ErrorClass.AGENT_BUG,
        "agent_raised",
    )
    assert "an ordinary error" in completion.error.detail


async def test_log_lines_of_the_process_are_those_of_its_worker(make_runtime, caplog) -> None:
    with caplog.at_level(logging.INFO):
        await execute(asked("log"), make_runtime())
    found = [r for r in caplog.records if r.name == "rollout_plugin_deadly_agents"]
    assert "A line of the isolated agent." in [record.getMessage() for record in found]


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("kill", "signal SIGKILL"),
        ("exit", "code 3"),
        ("abort", "signal SIGABRT"),
        ("memory", "signal SIGABRT"),
        ("leave", "code 4"),
        ("close_all", "before the rollout was done"),
    ],
)
async def test_a_process_that_dies_while_its_worker_lives_dies_of_its_rollout(
    make_runtime, deed, words
) -> None:
    runtime = make_runtime()
    completion = await execute(asked(deed), runtime)
    assert completion.error is not None
    assert completion.error.error_class is ErrorClass.WORKER_LOST
    assert completion.error.code == "process_died"
    assert words in completion.error.message
    # The next one is not affected.
    assert await pid_of(runtime, asked(index=1)) != os.getpid()


async def test_the_commands_of_a_dead_process_end_and_those_of_others_do_not(
    make_runtime, tmp_path
) -> None:
    runtime = make_runtime()
    folders = [tmp_path / name for name in ("first", "second")]
    tasks: list[asyncio.Task[Completion]] = []
    for index, folder in enumerate(folders):
        (folder / "root").mkdir(parents=True)
        request = asked("command", index, prompt={"folder": str(folder)})
        tasks.append(asyncio.create_task(execute(request, runtime)))
    first, second = [await commanded(folder / "root" / "pid") for folder in folders]
    (folders[0] / "die").touch()
    assert (await tasks[0]).error is not None
    await until(lambda: not is_running(first))
    assert is_running(second)
    (folders[1] / "die").touch()
    await tasks[1]
    await until(lambda: not is_running(second))


async def commanded(path: Path) -> int:
    await until(path.exists)
    return int(path.read_text())


async def test_the_death_of_the_server_is_no_rollouts_fault_and_a_new_one_starts(
    make_runtime,
) -> None:
    runtime = make_runtime()
    completion = await execute(asked("kill_server"), runtime)
    assert completion.error is not None
    assert completion.error.error_class is ErrorClass.WORKER_LOST
    assert completion.error.code == "server_died"
    assert await pid_of(runtime, asked(index=1)) != os.getpid()


async def test_processes_and_their_commands_die_with_a_killed_worker(tmp_path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from pipeline.settings import load_settings\n"
        "from pipeline.contract.messages import RolloutRequest\n"
        "from workers.process.execution import execute\n"
        "from workers.process.runtime import Runtime\n"
        "worker = {'plugins': [sys.argv[1]]}\n"
        "values = {'worker': worker, 'llm': {'base_url': 'http://127.0.0.1:9/v1'}}\n"
        "settings = load_settings(overrides=values, start=Path('/'))\n"
        "request = RolloutRequest.model_validate_json(sys.argv[2])\n"
        "asyncio.run(execute(request, Runtime(settings, 'w1', isolates=True)))\n"
    )
    request = asked("sleep", prompt={"folder": str(tmp_path)}).model_dump_json()
    worker = subprocess.Popen([sys.executable, "-c", program, str(PLUGIN), request])
    try:
        pids = await started(tmp_path)
        assert worker.pid not in pids
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: not any(map(is_running, pids)))


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_child, "CANCEL_GRACE_S", 0.5)
    monkeypatch.setattr(isolated_child, "_MARGIN_S", 0.5)


@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize("deed", ["block", "stop"])
async def test_a_process_that_does_not_answer_ends_at_its_time_limit(make_runtime, deed) -> None:
    runtime = make_runtime()
    request = asked(deed, limits={"timeout_s": 1.0})
    async with asyncio.timeout(60):
        completion = await execute(request, runtime)
    assert completion.error is not None
    assert completion.error.error_class is ErrorClass.AGENT_TIMEOUT
    assert completion.error.code == "process_blocked"
    assert not runtime.in_flight.attempts()


async def test_a_time_limit_is_that_of_a_run_in_the_worker(make_runtime, tmp_path) -> None:
    request = asked("sleep", prompt={"folder": str(tmp_path)}, limits={"timeout_s": 1.0}, scored=())
    completion = await execute(request, make_runtime())
    assert completion.error is not None
    assert completion.error.code == "agent_timeout"
    assert (tmp_path / "cancelled").exists()


async def test_a_cancelled_attempt_cleans_up_and_its_process_ends(make_runtime, tmp_path) -> None:
    runtime = make_runtime()
    request = asked("sleep", prompt={"folder": str(tmp_path)})
    task = asyncio.create_task(execute(request, runtime))
    pids = await started(tmp_path)
    (beat,) = runtime.in_flight.beats()
    assert beat.key == request.key
    assert runtime.in_flight.stop(frozenset({request.label})) == 1
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "cancelled").exists()
    await until(lambda: not any(map(is_running, pids)))


async def test_a_process_that_ignores_its_cancellation_is_killed(
    make_runtime, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(isolated_child, "CANCEL_GRACE_S", 0.5)
    monkeypatch.setattr(isolated_child, "_REST_S", 0.5)
    runtime = make_runtime()
    request = asked("sleep", prompt={"folder": str(tmp_path)})
    task = asyncio.create_task(execute(request, runtime))
    pids = await started(tmp_path)
    os.kill(pids[0], signal.SIGSTOP)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(map(is_running, pids)))


async def test_an_attempt_that_is_handed_back_says_so(make_runtime, tmp_path) -> None:
    runtime = make_runtime()
    request = asked("sleep", prompt={"folder": str(tmp_path)})
    task = asyncio.create_task(execute(request, runtime))
    await started(tmp_path)
    assert runtime.in_flight.hand_back_all() == 1
    completion = await task
    assert completion.error is not None
    assert completion.error.error_class is ErrorClass.WORKER_STOPPED


async def test_the_phase_and_the_step_are_reported_as_they_are(make_runtime, tmp_path) -> None:
    runtime = make_runtime()
    request = asked("sleep", prompt={"folder": str(tmp_path)})
    task = asyncio.create_task(execute(request, runtime))
    await started(tmp_path)
    await until(lambda: runtime.in_flight.attempts()[0].phase == "generating")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
