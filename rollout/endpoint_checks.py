"""Checks of the model endpoints: whether each answers, and returns the token ids for training.

`checks.py` uses it for `rollout doctor`. Must not: call a model more than once per endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import aiohttp

from pipeline.contract.errors import ModelError, ModelTransportError
from pipeline.contract.url_secrets import hide_passwords
from pipeline.settings import Settings
from rollout.check_result import Check, guarded
from rollout.endpoint import Probe, probe
from workers.core.model_response import ModelResponse
from workers.llm.call_retries import CallRetryPolicy
from workers.llm.providers import find_provider, make_client
from workers.llm.server_kind import ask_kind
from workers.llm.token_capture import KIND_FIELDS, ServerKind

#: Longest wait for the one model call.
CALL_S = 10.0


def check_endpoints(settings: Settings) -> Iterator[Check]:
    """Yield for each endpoint of the settings whether it answers and returns token ids."""
    if not settings.llm.base_urls:
        remedy = "Set OPENAI_BASE_URL, or give each run --base-url."
        yield Check("model endpoint", "warning", "none is named", remedy)
    for url in settings.llm.base_urls:
        found = probe(settings, url)
        yield _endpoint(hide_passwords(url), found)
        if found.error is None:
            yield guarded("token ids", partial(_token_ids, settings, url, found))


def _endpoint(url: str, found: Probe) -> Check:
    if found.right_url:
        remedy = f"Set OPENAI_BASE_URL={hide_passwords(found.right_url)}"
        return Check("model endpoint", "failed", f"{url}: {found.error}", remedy, 3)
    if not found.is_reachable:
        remedy = "Start it, or change OPENAI_BASE_URL."
        return Check("model endpoint", "failed", f"{url}: {found.error}", remedy, 6)
    if found.error:
        remedy = "Check the key (OPENAI_API_KEY) and that the address ends with /v1."
        return Check("model endpoint", "warning", f"{url}: {found.error}", remedy)
    return Check("model endpoint", "ok", f"{url}: {', '.join(found.models[:5]) or 'no models'}")


def _token_ids(settings: Settings, url: str, found: Probe) -> Check:
    """Make one model call, and report the fields that a trainer needs and its answer lacks."""
    shown, named = hide_passwords(url), settings.llm.server
    if find_provider(base_url=url).host:
        return Check("token ids", "ok", f"{shown}: not asked for; runs there record text alone")
    model = settings.llm.model or (found.models[0] if len(found.models) == 1 else None)
    if model is None:
        detail = f"{shown}: not tried, because no model is named"
        return Check("token ids", "warning", detail, "Set ROLLOUT_LLM__MODEL.")
    try:
        kind, response = _call_with_tokens(settings, url, model)
    except ModelError as error:
        detail = f"{shown}: a call of {model} failed: {error}"
        remedy = "Check the model's name (ROLLOUT_LLM__MODEL) and the server's log."
        if named != "auto":
            remedy += f" ROLLOUT_LLM__SERVER={named} decides which fields are sent."
        return Check("token ids", "warning", detail, remedy)
    lacks = [
        name
        for name, value in (
            ("prompt ids", response.prompt_token_ids),
            ("completion ids", response.completion_token_ids),
            ("logprobs", response.logprobs),
        )
        if value is None
    ]
    if not lacks:
        return Check("token ids", "ok", f"{shown}: {model} returns ids and logprobs ({kind})")
    why = response.metadata.get("token_refusal")
    detail = f"{shown}: {model} ({kind}) returns no {', no '.join(lacks)}"
    detail += f" ({why})" if why else ""
    return Check("token ids", "warning", detail, _remedy_for_ids(kind, named, lacks))


def _call_with_tokens(
    settings: Settings, base_url: str, model: str
) -> tuple[ServerKind, ModelResponse]:
    """Make one model call that asks for token ids, as workers do; it samples one token.

    Args:
        settings: Their key is sent, and `llm.server` decides how ids are asked for.
        base_url: One of the settings' endpoints.
        model: The model to call.

    Returns:
        The kind of server that the endpoint was taken for, and its response.

    Raises:
        ModelError: The call failed, or took longer than `CALL_S`.
    """
    key = settings.llm.api_key.get_secret_value() if settings.llm.api_key else ""

    async def call() -> tuple[ServerKind, ModelResponse]:
        named = settings.llm.server
        kind = await ask_kind(base_url, key) if named == "auto" else named
        client = make_client(
            base_url=base_url,
            api_key=key,
            model=model,
            kind=settings.llm.client,
            retries=CallRetryPolicy(max_retries=0),
            capture_tokens=True,
            capture_fields=KIND_FIELDS[kind],
        )
        async with client, asyncio.timeout(CALL_S):
            message = {"role": "user", "content": "Say yes."}
            return kind, await client.generate([message], max_tokens=1)

    try:
        return asyncio.run(call())
    except TimeoutError:
        raise ModelTransportError(f"No answer came within {CALL_S:g} s.", code="timeout") from None
    except aiohttp.ClientError as error:
        # Its text may hold the URL with its password.
        why = f"It does not say which server it is: {type(error).__name__}."
        raise ModelTransportError(why, code="connection") from None


def _remedy_for_ids(kind: str, named: str, lacks: Sequence[str]) -> str:
    if kind == "openai" and named == "openai":
        return "For training: set ROLLOUT_LLM__SERVER=auto; with `openai` no ids are asked for."
    if kind == "openai":
        return (
            "For training: serve the model with vLLM 0.10.2 or SGLang. If it is one of them behind "
            "a proxy, set ROLLOUT_LLM__SERVER=vllm or sglang."
        )
    if list(lacks) == ["logprobs"]:
        return "For training: let the server, or the proxy before it, answer `logprobs: true`."
    upgrade = "vLLM returns ids from 0.10.2 on" if kind == "vllm" else "SGLang must be recent"
    other = f" Is ROLLOUT_LLM__SERVER={named} right?" if named != "auto" else ""
    return f"For training: upgrade the server ({upgrade}), or the proxy before it.{other}"
