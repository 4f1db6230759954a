"""The compose file and the image, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from documented_commands import ROOT, require_help, require_parses

from pipeline.settings import _ALIASES, Settings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
ONE_SHOT = "migrate"
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)

every_service = pytest.mark.parametrize("name", sorted(SERVICES))
each_of_ours = pytest.mark.parametrize("name", OURS)


def environment(name: str) -> dict[str, str]:
    return SERVICES[name].get("environment", {})


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


def test_it_has_the_services_of_a_deployment() -> None:
    assert set(SERVICES) == {"postgres", "redis", "migrate", "controller", "worker", "flower"}
    assert OURS == ["controller", "flower", "migrate", "worker"]


@each_of_ours
def test_its_command_is_one_of_the_command_line(name: str) -> None:
    words = shlex.split(SERVICES[name]["command"])
    require_parses(words)
    require_help(words)


@each_of_ours
def test_its_health_is_asked_by_a_command_there_is(name: str) -> None:
    test = SERVICES[name].get("healthcheck", {}).get("test", [])
    if "rollout" in test[1:2]:
        require_parses(test[1:])


@every_service
def test_a_service_that_stays_says_whether_it_is_healthy(name: str) -> None:
    if name == ONE_SHOT:
        assert SERVICES[name]["restart"] == "no"
        return
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert seconds(check["timeout"]) <= seconds(check["interval"])


@every_service
def test_the_image_is_pinned(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].partition(":")
    assert image
    assert re.match(r"\d", tag), f"{image} has no version"


@every_service
def test_it_runs_confined_and_not_as_root(name: str) -> None:
    service = SERVICES[name]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["read_only"] is True
    assert "/tmp" in service["tmpfs"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")


@every_service
def test_it_mounts_nothing_of_the_host(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = volume.partition(":")[0]
        assert source in COMPOSE["volumes"], volume


@every_service
def test_ports_are_published_on_loopback_only(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


@every_service
def test_a_secret_comes_from_the_environment_file(name: str) -> None:
    for variable, value in environment(name).items():
        if re.search("PASS|KEY|URL|AUTH", variable):
            assert "${" in value, f"{variable} of {name} is written into the file"
    assert "--requirepass" not in str(SERVICES[name].get("command", ""))


@each_of_ours
def test_a_variable_is_a_setting(name: str) -> None:
    for variable in environment(name):
        if variable in _ALIASES:
            continue
        section, _, field = variable.removeprefix("ROLLOUT_").lower().partition("__")
        assert field in type(Settings.model_fields[section].default).model_fields, variable


def test_a_worker_has_no_way_into_the_database() -> None:
    assert "ROLLOUT_DATABASE__URL" not in environment("worker")
    assert "POSTGRES" not in str(environment("worker"))
    assert "store" not in SERVICES["worker"]["networks"]


def test_nothing_runs_before_what_it_needs() -> None:
    controller = SERVICES["controller"]["depends_on"]
    assert controller[ONE_SHOT]["condition"] == "service_completed_successfully"
    assert SERVICES[ONE_SHOT]["depends_on"]["postgres"]["condition"] == "service_healthy"
    for name in ("controller", "worker", "flower"):
        assert SERVICES[name]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_a_worker_is_given_the_time_it_takes_to_drain() -> None:
    words = shlex.split(SERVICES["worker"]["command"])
    drain_s = float(words[words.index("--drain-s") + 1])
    # The outbox may flush for 20 s after the last attempt has ended.
    assert seconds(SERVICES["worker"]["stop_grace_period"]) >= drain_s + 30


def test_the_image_runs_as_the_user_that_compose_names() -> None:
    user = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert user == [SERVICES["worker"]["user"]]
    assert DOCKERFILE.count("\nFROM ") + DOCKERFILE.startswith("FROM ") == 2


def test_the_image_holds_every_package() -> None:
    for package in ("rollout", "pipeline", "producers", "workers", "migrations"):
        assert re.search(rf"^COPY {package} ", DOCKERFILE, re.MULTILINE)
        assert f"!{package}" in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
