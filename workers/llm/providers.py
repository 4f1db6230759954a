"""Model providers by name and base URL, with their clients and the environment names of their keys.

Entry points (worker, CLI, examples) call `make_client` and pass the environment as a mapping. A
key is sent only to the provider that it belongs to. Must not: read the environment, or import an
SDK before a client of that kind is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from pipeline.contract.errors import ConfigError
from workers.llm.chat_client import ChatClient
from workers.llm.token_capture import CAPTURE_FIELDS, KIND_FIELDS

ClientKind = Literal["sdk", "lean"]

_LOGPROBS_ONLY: Mapping[str, Any] = MappingProxyType({"logprobs": True})
_OWN_URL = ("OPENAI_BASE_URL", "BASE_URL")


@dataclass(frozen=True, slots=True)
class Provider:
    """One kind of endpoint. Names are environment variables; the first that is set is used."""

    name: str
    base_url: str | None = None
    base_url_names: tuple[str, ...] = ()
    key_names: tuple[str, ...] = ()
    model_names: tuple[str, ...] = ("MODEL_ID",)
    speaks: Literal["openai", "anthropic"] = "openai"
    capture_fields: Mapping[str, Any] = field(default_factory=lambda: CAPTURE_FIELDS)
    max_tokens_field: str = "max_tokens"

    @property
    def host(self) -> str | None:
        """Host of the provider's public address, None for a self-hosted provider."""
        host = urlsplit(self.base_url or "").hostname
        return None if host in (None, "127.0.0.1") else host


_PROVIDERS = (
    # Any OpenAI-compatible endpoint; OPENAI_BASE_URL holds its address.
    Provider("custom", None, _OWN_URL, ("OPENAI_API_KEY",)),
    Provider(
        "openai",
        "https://api.openai.com/v1",
        _OWN_URL,
        ("OPENAI_API_KEY",),
        capture_fields=_LOGPROBS_ONLY,
        max_tokens_field="max_completion_tokens",  # reasoning models reject the older name
    ),
    Provider(
        "anthropic",
        "https://api.anthropic.com",
        ("ANTHROPIC_BASE_URL",),
        ("ANTHROPIC_API_KEY",),
        ("ANTHROPIC_MODEL", "MODEL_ID"),
        speaks="anthropic",
    ),
    Provider("vllm", "http://127.0.0.1:8000/v1", _OWN_URL, ("VLLM_API_KEY", "OPENAI_API_KEY")),
    Provider(
        "sglang",
        "http://127.0.0.1:30000/v1",
        _OWN_URL,
        ("SGLANG_API_KEY", "OPENAI_API_KEY"),
        capture_fields=KIND_FIELDS["sglang"],
    ),
    Provider("ollama", "http://127.0.0.1:11434/v1", ("OLLAMA_BASE_URL",)),
    Provider("llamacpp", "http://127.0.0.1:8080/v1", ("LLAMACPP_BASE_URL",)),
    Provider(
        "openrouter",
        "https://openrouter.ai/api/v1",
        key_names=("OPENROUTER_API_KEY",),
        capture_fields=_LOGPROBS_ONLY,
    ),
    Provider(
        "together",
        "https://api.together.xyz/v1",
        key_names=("TOGETHER_API_KEY",),
        capture_fields=_LOGPROBS_ONLY,
    ),
    Provider(
        "deepseek",
        "https://api.deepseek.com/v1",
        key_names=("DEEPSEEK_API_KEY",),
        capture_fields=_LOGPROBS_ONLY,
    ),
    Provider("groq", "https://api.groq.com/openai/v1", key_names=("GROQ_API_KEY",)),
    Provider("mistral", "https://api.mistral.ai/v1", key_names=("MISTRAL_API_KEY",)),
)

PROVIDERS: Mapping[str, Provider] = MappingProxyType({p.name: p for p in _PROVIDERS})


def find_provider(name: str | None = None, base_url: str | None = None) -> Provider:
    """Return the provider of this name, else the provider at the base URL's host, else `custom`.

    Raises:
        ConfigError: No provider has that name.
    """
    if name is not None:
        provider = PROVIDERS.get(name.lower())
        if provider is None:
            raise ConfigError(
                f"There is no model provider named {name!r}.",
                remedy=f"Known are {', '.join(PROVIDERS)}; `custom` with a base URL is any other.",
            )
        return provider
    host = urlsplit(base_url or "").hostname
    return next((p for p in _PROVIDERS if host and p.host == host), PROVIDERS["custom"])


def make_client(
    provider: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
    kind: ClientKind = "sdk",
    **options: Any,
) -> ChatClient:
    """Make the client for a provider's name, a base URL, or the environment's settings.

    Args:
        provider: A name from `PROVIDERS`; None finds the provider by the base URL.
        base_url: Overrides the environment's and the provider's own.
        api_key: Overrides the environment's.
        model: Overrides the environment's.
        environ: Environment variables; None means an empty environment.
        kind: `sdk` for the SDK's client, `lean` for `LeanClient`.
        **options: As in `ChatClient`.

    Raises:
        ConfigError: The provider is unknown, no base URL is given, or the SDK is not installed.
    """
    environ = environ or {}
    if provider is None and base_url is None:
        provider, base_url = _from_environment(model, environ)
    chosen = find_provider(provider, base_url)
    own_url = base_url or _first(environ, chosen.base_url_names) or chosen.base_url
    if own_url is None:
        raise ConfigError(
            "No model endpoint is named.",
            remedy="Give --base-url, set OPENAI_BASE_URL, or name a provider.",
        )
    key = api_key if api_key is not None else _key(chosen, own_url, environ)
    named = model or _first(environ, chosen.model_names)
    if chosen.speaks == "anthropic":
        return _claude(key, own_url, named, options)
    options.setdefault("capture_fields", chosen.capture_fields)
    options.setdefault("max_tokens_field", chosen.max_tokens_field)
    return _client_class(kind)(own_url, key, model=named, **options)


def _from_environment(
    model: str | None, environ: Mapping[str, str]
) -> tuple[str | None, str | None]:
    if (model or "").startswith("claude") and environ.get("ANTHROPIC_API_KEY"):
        return "anthropic", None
    base_url = _first(environ, _OWN_URL)
    if base_url is not None:
        return None, base_url
    for name, key in (("openai", "OPENAI_API_KEY"), ("anthropic", "ANTHROPIC_API_KEY")):
        if environ.get(key):
            return name, None
    return None, None


def _key(provider: Provider, base_url: str, environ: Mapping[str, str]) -> str | None:
    # OPENAI_API_KEY belongs to the address in OPENAI_BASE_URL, or to OpenAI's own. An endpoint at
    # another provider's host must not receive it.
    host = urlsplit(base_url).hostname
    owner = next((p for p in _PROVIDERS if p.host and p.host == host), None)
    if owner is not None and owner is not provider:
        provider = owner
    return _first(environ, provider.key_names)


def _claude(
    key: str | None, base_url: str, model: str | None, options: Mapping[str, Any]
) -> ChatClient:
    try:
        from workers.llm.anthropic_client import DEFAULT_MODEL, ClaudeAPIClient
    except ModuleNotFoundError as error:
        raise ConfigError(
            "The anthropic SDK is not installed.",
            remedy="pip install 'rollout-pipeline[anthropic]'",
        ) from error
    return ClaudeAPIClient(key, base_url=base_url, model=model or DEFAULT_MODEL, **options)


def _client_class(kind: ClientKind) -> type[ChatClient]:
    if kind == "lean":
        from workers.llm.lean_client import LeanClient

        return LeanClient
    from workers.llm.openai_client import OpenAIClient

    return OpenAIClient


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
