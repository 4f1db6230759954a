"""All settings of a process: one frozen object, built at entry points and passed down.

Sources, from low to high precedence: defaults, `rollout.toml` found upwards, its `[profile.NAME]`,
`.env`, `ROLLOUT_*` variables (nested by `__`), flags. No other module reads the environment.
"""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from pipeline.contract.errors import ConfigError
from pipeline.contract.url_secrets import MASK, hide_passwords
from pipeline.settings.sections import (
    AgentCoreSettings,
    AwsSettings,
    BrokerSettings,
    CollectorSettings,
    DatabaseSettings,
    DispatchSettings,
    FlowerSettings,
    GatewaySettings,
    JournalSettings,
    LeaseSettings,
    LimitsRedisSettings,
    LlmSettings,
    PayloadSettings,
    WorkerSettings,
)

log = logging.getLogger(__name__)

TOML_NAME = "rollout.toml"

#: Variables of other tools with the same meaning; our own names take precedence.
_ALIASES = {
    "OPENAI_BASE_URL": ("llm", "base_url"),
    "BASE_URL": ("llm", "base_url"),
    "OPENAI_API_KEY": ("llm", "api_key"),
    "MODEL_ID": ("llm", "model"),
    "ANTHROPIC_API_KEY": ("llm", "anthropic_api_key"),
    "ANTHROPIC_BASE_URL": ("llm", "anthropic_base_url"),
    "AWS_REGION": ("aws", "region"),
    "AWS_ENDPOINT_URL": ("aws", "endpoint_url"),
    "AWS_ENDPOINT_URL_SQS": ("aws", "sqs_endpoint_url"),
    "AWS_ENDPOINT_URL_S3": ("aws", "s3_endpoint_url"),
}

#: Settings of earlier versions: accepted with a warning, and without effect.
_OBSOLETE = {
    ("llm", "capture_tokens"): "Runs say by their field `tokens` whether ids are recorded."
}


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix="ROLLOUT_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    data_dir: Path = Field(default=Path(".rollout"), description="Private servers, payloads, logs.")
    profile: str | None = Field(
        default=None, description="Which [profile.NAME] of rollout.toml to use."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severe line that is logged."
    )
    run: dict[str, Any] = Field(
        default={},
        description="Fields of each run made here, unless the command's options set them.",
    )
    database: DatabaseSettings = DatabaseSettings()
    broker: BrokerSettings = BrokerSettings()
    aws: AwsSettings = AwsSettings()
    dispatch: DispatchSettings = DispatchSettings()
    lease: LeaseSettings = LeaseSettings()
    collector: CollectorSettings = CollectorSettings()
    journal: JournalSettings = JournalSettings()
    payloads: PayloadSettings = PayloadSettings()
    llm: LlmSettings = LlmSettings()
    limits: LimitsRedisSettings = LimitsRedisSettings()
    worker: WorkerSettings = WorkerSettings()
    gateway: GatewaySettings = GatewaySettings()
    agentcore: AgentCoreSettings = AgentCoreSettings()
    flower: FlowerSettings = FlowerSettings()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: Any, init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take arguments only: `load_settings` merges files, environment and flags."""
        return (init_settings,)

    @property
    def limits_redis_url(self) -> str | None:
        """The Redis that holds limits on model calls; None: none is set, calls are unlimited."""
        url = self.limits.redis_url or self.broker.url
        if url is None:
            return None
        value = url.get_secret_value()
        is_redis = value.startswith(("redis://", "rediss://", "redis+socket://", "unix://"))
        files = self.broker.tls_files(ca="ssl_ca_certs", cert="ssl_certfile", key="ssl_keyfile")
        if value.startswith("rediss://") and "ssl_" not in value and files:
            value += ("&" if "?" in value else "?") + urlencode(files)
        return value if is_redis or self.limits.redis_url else None

    @property
    def limits_prefix(self) -> str:
        """The prefix of the keys of limits."""
        return f"{self.broker.prefix}rollout:limits"

    @property
    def embedded_database(self) -> bool:
        """Whether the database is a private server."""
        return self.database.url is None

    @property
    def embedded_broker(self) -> bool:
        """Whether the broker is a private server."""
        return self.broker.url is None


def load_settings(
    *, overrides: Mapping[str, Any] | None = None, start: Path | None = None
) -> Settings:
    """Build the settings of this process.

    Args:
        overrides: Flags, nested like the settings; None values are left out.
        start: Folder from which `rollout.toml` and `.env` are looked for upwards.

    Raises:
        ConfigError: A value is invalid or a name is unknown; the message proposes a remedy.
    """
    layers = [layer for _, layer in settings_layers(overrides=overrides, start=start)]
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer)
    _drop_obsolete(merged)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _config_error(error) from error


def _drop_obsolete(merged: dict[str, Any]) -> None:
    for (section, field), why in _OBSOLETE.items():
        fields = merged.get(section)
        if isinstance(fields, dict) and field in fields:
            del fields[field]
            log.warning("The setting %s.%s has no effect any more. %s", section, field, why)


def settings_layers(
    *, overrides: Mapping[str, Any] | None = None, start: Path | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """Return the values of each source with its name, from low to high precedence."""
    start = start or Path.cwd()
    layers: list[tuple[str, dict[str, Any]]] = []
    path = _find_upwards(TOML_NAME, start)
    document = _read_toml(path) if path else {}
    profiles = document.pop("profile", {})
    if not isinstance(profiles, dict):
        raise ConfigError(
            f"{path} says profile = {profiles!r}, but the file only defines profiles.",
            remedy="Choose one by --profile or ROLLOUT_PROFILE.",
        )
    layers.append((str(path or TOML_NAME), document))
    flags = _without_none(overrides or {})
    profile = flags.get("profile") or os.environ.get("ROLLOUT_PROFILE")
    if profile:
        if profile not in profiles:
            raise ConfigError(
                f"There is no [profile.{profile}] in {path or TOML_NAME}.",
                remedy=f"Known profiles: {', '.join(profiles) or 'none'}.",
            )
        layers.append((f"[profile.{profile}]", profiles[profile]))
    dotenv = _find_upwards(".env", start)
    if dotenv:
        layers.append((str(dotenv), _from_dotenv(dotenv)))
    layers.append(("environment aliases", _from_aliases(os.environ)))
    layers.append(("environment", _environment()))
    layers.append(("flags", flags))
    return layers


def _environment() -> dict[str, Any]:
    known = _read(EnvSettingsSource(Settings))
    prefix = "ROLLOUT_"
    for name in os.environ:
        section = name.removeprefix(prefix).lower().split("__")[0]
        if name.startswith(prefix) and section not in Settings.model_fields:
            raise ConfigError(
                f"The environment variable {name} is no setting.",
                remedy=_did_you_mean(section, Settings.model_fields),
            )
    return known


def _from_dotenv(path: Path) -> dict[str, Any]:
    source = DotEnvSettingsSource(Settings, env_file=path, env_file_encoding="utf-8")
    pairs = {key.upper(): value for key, value in source.env_vars.items() if value}
    layer = _from_aliases(pairs)
    # Other tools share .env, so names that are not ours are ignored.
    own = {key: value for key, value in _read(source).items() if key in Settings.model_fields}
    return _merge(layer, own)


def _read(source: EnvSettingsSource) -> dict[str, Any]:
    try:
        return source()
    except SettingsError as error:
        raise ConfigError(
            "A whole section cannot be read from its variable.",
            why=f"{error}: {error.__cause__}.",
            remedy="Set its fields one by one, as in ROLLOUT_WORKER__CONCURRENCY=500.",
        ) from error


def _from_aliases(environment: Mapping[str, str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for name, (section, field) in _ALIASES.items():
        if environment.get(name):
            layer.setdefault(section, {}).setdefault(field, environment[name])
    return layer


def _find_upwards(name: str, start: Path) -> Path | None:
    for folder in (start, *start.resolve().parents):
        if (folder / name).is_file():
            return folder / name
    return None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML.", why=str(error)) from error


def _merge(base: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            base[key] = _merge(dict(base[key]), value)
        else:
            base[key] = value
    return base


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _config_error(error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    name = "ROLLOUT_" + "__".join(place).upper()
    if first["type"] == "extra_forbidden":
        model: Any = Settings
        for part in place[:-1]:
            model = model.model_fields[part].annotation
        return ConfigError(
            f"There is no setting {'.'.join(place)}.",
            remedy=_did_you_mean(place[-1], model.model_fields),
        )
    return ConfigError(
        f"The setting {'.'.join(place)} cannot be {_shown_input(place, first.get('input'))}.",
        why=f"{first['msg']}.",
        remedy=f"Set it in {TOML_NAME} or by {name}.",
    )


def _shown_input(place: Sequence[str], value: Any) -> str:
    """Return a rejected value as it may be shown; one of a secret setting may be the secret."""
    model: Any = Settings
    for part in place:
        field = model.model_fields.get(part)
        if field is None:
            break
        if "SecretStr" in repr(field.annotation):
            return MASK
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
    return hide_passwords(repr(value))


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known names: {', '.join(sorted(known))}."
