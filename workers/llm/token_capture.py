"""The token ids, logprobs and policy version that a server recorded at sampling.

Model clients send the request fields that ask for them, and `chat_answers` reads them from every
answer. Servers use different fields. The ids of one field are never combined with the logprobs of
another. Must not: tokenise text, or repair data.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pipeline.tokens.prompt_prefixes import MAX_ID, packed_ids

ServerKind = Literal["vllm", "sglang", "openai"]
#: Request fields for token capture; the names are vLLM's, which SGLang accepts too.
CAPTURE_FIELDS: Mapping[str, Any] = MappingProxyType({"logprobs": True, "return_token_ids": True})
#: The request fields for each kind of server; a plain OpenAI server may reject unknown fields.
KIND_FIELDS: Mapping[ServerKind, Mapping[str, Any]] = MappingProxyType(
    {
        "vllm": CAPTURE_FIELDS,
        "sglang": {**CAPTURE_FIELDS, "return_prompt_token_ids": True, "return_meta_info": True},
        "openai": {},
    }
)
#: Servers write this number for a token whose logprob is unknown.
MISSING_LOGPROB = -9999.0
_TOKEN_ID_PREFIX = "token_id:"


class CapturedTokens(NamedTuple):
    """The tokens that a server recorded; all fields are None if it recorded nothing.

    `refusal` says why data that the server sent is not used.
    """

    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: list[float] | None = None
    source: str | None = None
    refusal: str | None = None


class _Completion(NamedTuple):
    source: str
    ids: Any
    logprobs: Any


def captured_tokens(body: Mapping[str, Any], choice: Mapping[str, Any]) -> CapturedTokens:
    """Read token ids and logprobs: top level, the choice, `meta_info`, `token_id:` strings.

    A field with both ids and logprobs is preferred to one with ids alone. Ids and logprobs of
    unequal length are rejected together, and so are ids that are not integers.
    """
    meta = _mapping(choice.get("meta_info")) or _mapping(body.get("meta_info"))
    content = _logprob_content(choice)
    places = (each for each in _completions(body, choice, meta, content) if each.ids is not None)
    place = next(places, None)
    if place is None:
        return CapturedTokens()
    if place.logprobs is None:
        place = next((each for each in places if each.logprobs is not None), place)
    try:
        ids = _ids(place.ids)
        logprobs = None if place.logprobs is None else [_logprob(item) for item in place.logprobs]
        prompt_ids = _prompt_ids(body, choice, meta)
    except (TypeError, ValueError, IndexError) as error:
        return CapturedTokens(refusal=f"{place.source}: {error}")
    if logprobs is not None and len(logprobs) != len(ids):
        return CapturedTokens(
            refusal=f"{place.source}: {len(ids)} token ids but {len(logprobs)} logprobs"
        )
    if logprobs and all(value == MISSING_LOGPROB for value in logprobs):
        logprobs = None
    return CapturedTokens(prompt_ids, ids, logprobs, place.source)


def policy_version(
    body: Mapping[str, Any], choice: Mapping[str, Any], headers: Mapping[str, str]
) -> int | None:
    """Read the version of the weights that answered; None if the server reports none."""
    for holder in (body.get("metadata"), choice.get("meta_info"), body.get("meta_info")):
        version = _version(_mapping(holder).get("weight_version"))
        if version is not None:
            return version
    return _version(headers.get("x-policy-version"))


def _completions(
    body: Mapping[str, Any], choice: Mapping[str, Any], meta: Mapping[str, Any], content: Any
) -> Iterator[_Completion]:
    content_logprobs = None if content is None else [item.get("logprob") for item in content]
    meta_pairs = meta.get("output_token_logprobs")
    yield _Completion("top_level", _first(body, _ID_KEYS), content_logprobs)
    yield _Completion("choice", _first(choice, _ID_KEYS), content_logprobs)
    yield _Completion("meta_info", _pair_ids(meta_pairs), _pair_logprobs(meta_pairs))
    yield _Completion("meta_info", _first(meta, ("output_ids", *_ID_KEYS)), None)
    yield _Completion("token_id_strings", _string_ids(content), content_logprobs)


_ID_KEYS = ("token_ids", "completion_token_ids", "output_token_ids", "response_token_ids")
_PROMPT_KEYS = ("prompt_token_ids", "input_token_ids")


def _prompt_ids(
    body: Mapping[str, Any], choice: Mapping[str, Any], meta: Mapping[str, Any]
) -> Sequence[int] | None:
    for holder in (body, choice, meta):
        ids = _first(holder, _PROMPT_KEYS)
        if ids is not None:
            return _ids(ids)
    pairs = _pair_ids(meta.get("input_token_logprobs"))
    return None if pairs is None else _ids(pairs)


def _logprob_content(choice: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    logprobs = _mapping(choice.get("logprobs"))
    if isinstance(values := logprobs.get("token_logprobs"), list):
        # A text completion has parallel lists.
        tokens = logprobs.get("tokens") or [None] * len(values)
        pairs = zip(tokens, values, strict=False)
        return [{"token": token, "logprob": value} for token, value in pairs]
    content = logprobs.get("content")
    if not isinstance(content, list) or not all(type(item) is dict for item in content):
        return None
    return content


def _string_ids(content: list[Mapping[str, Any]] | None) -> list[int] | None:
    tokens = [item.get("token") for item in content or ()]
    if not tokens or not all(
        isinstance(token, str) and token.startswith(_TOKEN_ID_PREFIX) for token in tokens
    ):
        return None
    suffixes = [str(token)[len(_TOKEN_ID_PREFIX) :] for token in tokens]
    return [int(text) for text in suffixes] if all(text.isdigit() for text in suffixes) else None


# SGLang sends a list of [logprob, token id, text or null].
def _pair_ids(pairs: Any) -> list[Any] | None:
    if not isinstance(pairs, list):
        return None
    return [pair[1] if _is_pair(pair) else None for pair in pairs]


def _pair_logprobs(pairs: Any) -> list[Any] | None:
    if not isinstance(pairs, list):
        return None
    return [pair[0] if _is_pair(pair) else None for pair in pairs]


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) >= 2


def _ids(values: Any) -> Sequence[int]:
    if isinstance(values, array):
        return values  # packed and checked by `known_prompts`
    if not isinstance(values, list):
        raise TypeError(f"token ids are {type(values).__name__}, not a list")
    # Servers return the whole prompt with each call, so that no check is a loop in Python.
    # `isinstance(True, int)` holds, but True is not a token id.
    if not set(map(type, values)) <= {int}:
        raise TypeError("token ids are not all integers")
    try:
        packed_ids(values)
    except OverflowError:
        raise ValueError(f"token ids are not all between 0 and {MAX_ID}") from None
    return values


def _logprob(value: Any) -> float:
    if value is None:
        return MISSING_LOGPROB
    number = float(value)
    return number if math.isfinite(number) and number > MISSING_LOGPROB else MISSING_LOGPROB


def _version(value: Any) -> int | None:
    if type(value) is int:
        return value
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else None


def _first(holder: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if (value := holder.get(key)) is not None:
            return value
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
