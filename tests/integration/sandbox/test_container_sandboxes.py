"""The docker and the Kubernetes sandbox, through their official clients, against local fakes."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_containers import FakeContainer
from fixtures.fake_docker import FakeDocker
from fixtures.fake_kubernetes import PROTOCOL, FakeKubernetes
from fixtures.sandboxes import LIMITS, Marked, require_kind

from workers.sandbox.base import Sandbox, SandboxFailure
from workers.sandbox.container import EXPIRES_LABEL, OWNER_LABEL, is_leftover, owner_labels
from workers.sandbox.files import files_of
from workers.sandbox.kinds import SandboxKind, open_sandbox
from workers.tools.bash_executor_tool import BashExecutorTool
from workers.tools.file_editor_tool import FileEditorTool

docker = pytest.importorskip("docker")
kubernetes = pytest.importorskip("kubernetes")
pytestmark = pytest.mark.timeout(60)


@dataclass
class Cluster:
    """A fake API and how to open a sandbox on it."""

    kind: SandboxKind
    fake: FakeDocker | FakeKubernetes
    root: str
    options: dict[str, Any]

    async def open(self, **options: Any) -> Sandbox:
        return await open_sandbox(
            self.kind, root=self.root, limits=LIMITS, **(self.options | options)
        )

    @property
    def containers(self) -> dict[str, FakeContainer]:
        return self.fake.containers if isinstance(self.fake, FakeDocker) else self.fake.pods

    @property
    def removed(self) -> list[str]:
        return self.fake.removed if isinstance(self.fake, FakeDocker) else self.fake.deleted


@pytest.fixture(params=["docker", "k8s"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    require_kind("bubblewrap")
    root = str(tmp_path / "workspace")
    if request.param == "docker":
        async with FakeDocker() as fake:
            yield Cluster("docker", fake, root, {"base_url": fake.url})
    else:
        async with FakeKubernetes() as fake:
            configuration = kubernetes.client.Configuration(host=fake.url)
            yield Cluster("k8s", fake, root, {"configuration": configuration})


@pytest.fixture
async def remote(cluster: Cluster) -> AsyncIterator[Sandbox]:
    async with await cluster.open() as opened:
        yield opened


async def test_command_gives_output_and_exit_code(remote: Sandbox) -> None:
    result = await remote.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert (await remote.run(["echo", "$HOME  x"])).stdout == "$HOME  x\n"
    assert (await remote.run("pwd")).stdout.strip() == remote.root
    assert (await remote.run("true")).succeeded


async def test_input_environment_and_working_directory_arrive(remote: Sandbox) -> None:
    data = b"x" * 300_000
    assert (await remote.run("wc -c", stdin=data)).stdout.strip() == "300000"
    assert (await remote.run("cat")).stdout == ""
    assert (await remote.run("echo no", stdin=data)).stdout == "no\n"
    result = await remote.run("echo $A; echo $B", env={"A": "a b", "B": "c"})
    assert result.stdout == "a b\nc\n"
    await remote.run("mkdir -p sub/dir && touch sub/dir/f")
    assert (await remote.run("ls", cwd="sub/dir")).stdout == "f\n"
    assert (await remote.run("ls", cwd="nowhere")).exit_code == 126


async def test_files_of_any_content_survive_the_way(remote: Sandbox) -> None:
    data = bytes(range(256)) * 2000
    await remote.write_file("deep/down/data.bin", data)
    assert await remote.read_file("deep/down/data.bin") == data
    await remote.write_file("deep/down/data.bin", b"")
    assert await remote.read_file("deep/down/data.bin") == b""
    for path, number in (("none", errno.ENOENT), ("deep", errno.EISDIR)):
        with pytest.raises(OSError, match=os.strerror(number)):
            await remote.read_file(path)
    with pytest.raises(OSError, match="larger than"):
        await remote.write_file("big", b"x" * (LIMITS.file_bytes + 1))


async def test_command_out_of_time_is_killed_and_the_sandbox_goes_on(
    remote: Sandbox, mark: Marked
) -> None:
    begun = time.monotonic()
    result = await remote.run(f"echo begun; sleep 1000; : {mark}", timeout_s=0.5)
    assert time.monotonic() - begun < 30
    assert result.timed_out
    assert result.exit_code == 124
    assert result.stdout == "begun\n"
    await mark.wait_gone()
    assert (await remote.run("echo alive")).stdout == "alive\n"


async def test_background_processes_end_with_their_command(remote: Sandbox, mark: Marked) -> None:
    result = await remote.run(f"setsid sh -c 'sleep 1000; : {mark}' & echo done")
    assert result.stdout == "done\n"
    await mark.wait_gone()


async def test_cancelled_command_is_killed(remote: Sandbox, mark: Marked) -> None:
    task = asyncio.create_task(remote.run(f"sleep 1000; : {mark}"))
    async with asyncio.timeout(10):
        while not mark.alive():
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await mark.wait_gone()
    assert (await remote.run("echo alive")).stdout == "alive\n"


async def test_command_that_starts_after_the_first_kill_is_killed_too(
    cluster: Cluster, mark: Marked
) -> None:
    async with await cluster.open() as opened:
        (container,) = cluster.containers.values()
        container.is_late = True
        result = await opened.run(f"sleep 1000; : {mark}", timeout_s=0.3)
        assert result.timed_out
        assert any(str(mark) in word for argv in container.executed for word in argv)
        await mark.wait_gone()


async def test_endless_output_is_cut_and_stopped(remote: Sandbox, mark: Marked) -> None:
    result = await remote.run(f"yes {mark}", timeout_s=15)
    assert result.truncated
    assert len(result.stdout) < 100 * 1024
    await mark.wait_gone()
    assert (await remote.run("echo alive")).stdout == "alive\n"


async def test_container_is_removed_on_close_and_closing_twice_is_harmless(
    cluster: Cluster,
) -> None:
    opened = await cluster.open()
    (name,) = cluster.containers
    await opened.close()
    await opened.close()
    assert cluster.removed == [name]
    with pytest.raises(SandboxFailure, match="closed"):
        await opened.run("true")


async def test_container_that_is_gone_is_a_sandbox_failure_not_a_result(cluster: Cluster) -> None:
    opened = await cluster.open()
    for container in list(cluster.containers.values()):
        await container.remove()
    cluster.containers.clear()
    with pytest.raises(SandboxFailure, match="died"):
        await opened.run("true")
    await opened.close()


async def test_refused_start_is_a_sandbox_failure_that_says_why(cluster: Cluster) -> None:
    cluster.fake.refuse_create = "quota exceeded for images"
    with pytest.raises(SandboxFailure, match="quota exceeded"):
        await cluster.open()
    assert not cluster.containers


async def test_api_that_is_not_there_is_a_sandbox_failure(cluster: Cluster) -> None:
    nowhere = "127.0.0.1:9"
    if cluster.kind == "docker":
        options: dict[str, Any] = {"base_url": f"tcp://{nowhere}"}
    else:
        configuration = kubernetes.client.Configuration(host=f"http://{nowhere}")
        configuration.retries = False
        options = {"configuration": configuration}
    with pytest.raises(SandboxFailure, match="would not start"):
        await cluster.open(**options)


async def test_container_has_no_privileges_no_network_and_bounds(cluster: Cluster) -> None:
    async with await cluster.open():
        (container,) = cluster.containers.values()
    spec = container.spec
    if cluster.kind == "docker":
        host = spec["HostConfig"]
        assert host["NetworkMode"] == "none"
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["Memory"] == LIMITS.memory_bytes
        assert host["PidsLimit"] == LIMITS.processes
        assert host["StorageOpt"] == {"size": str(LIMITS.disk_bytes)}
        assert not spec.get("Env")
    else:
        inner = spec["containers"][0]
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == "Never"
        assert spec["activeDeadlineSeconds"] > 0
        assert inner["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert inner["securityContext"]["allowPrivilegeEscalation"] is False
        assert inner["resources"]["limits"]["memory"] == str(LIMITS.memory_bytes)
        assert inner["resources"]["limits"]["ephemeral-storage"] == str(LIMITS.disk_bytes)
        assert container.labels["rollout-sandbox-network"] == "deny"
        assert isinstance(cluster.fake, FakeKubernetes)
        assert set(cluster.fake.protocols) == {PROTOCOL}


async def test_docker_without_quotas_starts_a_container_without_one() -> None:
    require_kind("bubblewrap")
    async with FakeDocker() as fake:
        fake.has_quota = False
        async with await open_sandbox("docker", limits=LIMITS, base_url=fake.url) as opened:
            assert (await opened.run("true")).succeeded
            (container,) = fake.containers.values()
        assert not container.spec["HostConfig"].get("StorageOpt")


async def test_leftovers_are_removed_on_open_and_the_living_stay(cluster: Cluster) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours = owner_labels(1000)
    place = ours[OWNER_LABEL].rpartition("-")[0]
    dead = ours | {OWNER_LABEL: f"{place}-{ended.pid}"}
    made = {
        "expired": ours | {EXPIRES_LABEL: "1"},
        "dead": dead,
        "ours": ours,
        "elsewhere": ours | {OWNER_LABEL: "another-host-1-999999"},
        "unlabelled": {"app": "database"},
    }
    for name, labels in made.items():
        cluster.containers[name] = FakeContainer(name, {"containers": []}, labels)
    async with await cluster.open():
        assert sorted(cluster.removed) == ["dead", "expired"]
    assert {"ours", "elsewhere", "unlabelled"} <= set(cluster.containers)


async def test_container_that_cannot_be_removed_is_logged_and_no_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> None:
        raise SandboxFailure("The API is away.")

    opened = await cluster.open()
    monkeypatch.setattr(type(opened), "_remove", fail)
    await opened.close()
    assert "The API is away. It ends by itself" in caplog.text


def test_labels_that_are_not_ours_are_no_leftovers() -> None:
    for labels in ({}, {OWNER_LABEL: ""}, {OWNER_LABEL: "x-y"}, {EXPIRES_LABEL: "soon"}):
        assert not is_leftover(labels)
    assert not is_leftover(owner_labels(10))
    assert len(owner_labels(10)[OWNER_LABEL]) <= 63


async def test_pod_whose_image_cannot_be_pulled_fails_at_once_and_is_deleted(
    tmp_path: Path,
) -> None:
    async with FakeKubernetes() as fake:
        fake.waiting_reason = "ImagePullBackOff"
        configuration = kubernetes.client.Configuration(host=fake.url)
        with pytest.raises(SandboxFailure, match="ImagePullBackOff: so it is"):
            await open_sandbox("k8s", root=tmp_path, configuration=configuration)
        assert len(fake.deleted) == 1
        fake.waiting_reason = "ContainerCreating"
        with pytest.raises(SandboxFailure, match="did not get ready"):
            await open_sandbox(
                "k8s", root=tmp_path, configuration=configuration, ready_timeout_s=0.7
            )
        assert len(fake.deleted) == 2


async def test_tools_work_in_a_container(cluster: Cluster) -> None:
    config = {"sandbox": cluster.kind, "root": cluster.root, "options": cluster.options}
    editor, bash = FileEditorTool(config), BashExecutorTool(config)
    create = {"command": "create", "path": "src/a.py", "file_text": "print('hello')\n"}
    assert (await editor.execute_tool("t", create)).success
    assert (await editor.execute_tool("t", {"command": "view", "path": "src/a.py"})).success
    listed = await editor.execute_tool("t", {"command": "view", "path": "."})
    assert listed.to_text() == "src/\nsrc/a.py"
    ran = await bash.execute_tool("t", {"command": "cat src/a.py"})
    assert ran.to_text() == "print('hello')"
    undone = await editor.execute_tool("t", {"command": "undo_edit", "path": "src/a.py"})
    assert undone.success
    assert len(cluster.containers) == 1
    await editor.release_instance("t")
    await bash.release_instance("t")
    assert not cluster.containers


async def test_trajectories_in_the_same_inner_directory_have_containers_of_their_own(
    cluster: Cluster,
) -> None:
    config = {"sandbox": cluster.kind, "root": cluster.root, "options": cluster.options}
    bash = BashExecutorTool(config)
    commands = {name: {"command": f"echo {name} >> f; cat f"} for name in ("one", "two")}
    said = await asyncio.gather(*(bash.execute_tool(n, given) for n, given in commands.items()))
    assert [result.to_text() for result in said] == ["one", "two"]
    assert len(cluster.containers) == 2
    for name in commands:
        await bash.release_instance(name)
    assert not cluster.containers


async def test_many_containers_work_side_by_side(cluster: Cluster) -> None:
    if cluster.kind == "k8s":
        assert isinstance(cluster.fake, FakeKubernetes)
        cluster.fake.polls_until_ready = 1
    roots = [f"{cluster.root}{n}" for n in range(6)]
    opened = [await open_sandbox(cluster.kind, root=root, **cluster.options) for root in roots]
    results = await asyncio.gather(*(one.run("sleep 0.2; pwd") for one in opened))
    assert [result.stdout.strip() for result in results] == roots
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(one.close() for one in opened))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not cluster.containers


async def test_listing_a_container_names_folders_with_a_slash(remote: Sandbox) -> None:
    await remote.run("mkdir -p a/b/c .hidden && touch a/f 'a/b/with space' .hidden/x a/b/c/deep")
    files = files_of(remote)
    assert await files.list(".", 2) == ["a/", "a/b/", "a/f"]
    assert await files.list("a/b", 1) == ["c/", "with space"]
    assert await files.is_folder("a/b")
    assert not await files.is_folder("a/f")
