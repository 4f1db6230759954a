"""The journal of one attempt: what it replays of earlier attempts, and records for the next one.

`ModelCalls` asks it before each call and tells it each answer; tools that must not run again do so,
too. Frames are packed where they are sent, in the outbox's thread. A rollout whose calls take less
than `journal.after_s` sends none, and then no request's digest is computed. Must not: raise, or
delay a call.
"""

from __future__ import annotations

import json
import logging
import sys
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.contract.journal import (
    CallKey,
    RecordedCall,
    RecordedTokens,
    digest_of_request,
    digest_of_value,
    pack_calls,
)
from pipeline.contract.messages import JournalFrame, RolloutRequest
from pipeline.contract.model_call import CallTokens, ModelCall
from pipeline.queue.journal_frames import ReadJournal
from pipeline.redaction import NOTHING, Redactor
from pipeline.settings import JournalSettings
from pipeline.tokens.prompt_prefixes import ITEM_BYTES
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.response_delta import OnDelta, ResponseDelta, ToolCallDelta

log = logging.getLogger(__name__)

#: Makes a frame when it is sent; None: there is nothing to send.
MakeFrame = Callable[[], JournalFrame | None]

NOTHING_RECORDED = ReadJournal([], 0)

#: Messages of requests that are held until their frame is packed; digests take less memory.
_MOST_HELD = 256

_RESPONSE_FIELDS = (
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "model",
    "response_id",
    "policy_version",
    "latency_ms",
    "metadata",
)


@dataclass(slots=True)
class _Answered:
    """A call that is in no frame yet; its request is held until its digest is needed."""

    number: int
    digest: str | None
    request: tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]] | None
    result: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    tokens: RecordedTokens | None

    def recorded(self, attempt_no: int) -> RecordedCall | None:
        digest = self.digest
        if digest is None and self.request is not None:
            digest = digest_of_request(*self.request)
        if digest is None:
            return None
        result = self.result() if callable(self.result) else self.result
        return RecordedCall((attempt_no, self.number), digest, result, self.tokens)


class Journal:
    """Replays and records the calls of one attempt.

    Args:
        request: The attempt.
        settings: When a frame is sent, and the size of the whole journal.
        recorded: What earlier attempts recorded.
        keep: Takes each frame, to make and send it; None: nothing is recorded.
        redactor: Finds secrets; answers that contain one are not recorded.
    """

    def __init__(
        self,
        request: RolloutRequest,
        settings: JournalSettings,
        *,
        recorded: ReadJournal = NOTHING_RECORDED,
        keep: Callable[[MakeFrame], None] | None = None,
        redactor: Redactor = NOTHING,
    ) -> None:
        self._request = request
        self._settings = settings
        self._keep = keep
        self._redactor = redactor
        self._recorded: dict[str, deque[RecordedCall]] = {}
        for call in recorded.calls:
            self._recorded.setdefault(call.digest, deque()).append(call)
        self._records = keep is not None and settings.after_s >= 0
        self._answered: deque[_Answered] = deque()
        self._numbers = 0
        #: By a call's sequence number in this attempt, the place where it is recorded.
        self._keys: dict[int, CallKey] = {}
        self._generated_s = 0.0
        self._held = 0
        self._is_sending = False
        self.calls_replayed = 0
        self.replayed_from: set[int] = set()
        self.tokens_saved = 0
        self._bytes = recorded.n_bytes

    def find(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> RecordedCall | None:
        """Return the recorded answer to an equal request, and forget it; None: there is none.

        Calls match by their digests and not by their order, because parallel calls have none.
        """
        if not self._recorded:
            return None
        return self._take(digest_of_request(messages, options))

    def note(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        response: ModelResponse,
        call: ModelCall,
        recorded: RecordedCall | None,
    ) -> None:
        """Note a call of the attempt: replayed from `recorded`, else made and to be recorded.

        Args:
            messages: As sent; the caller does not change them any more.
            options: As sent.
            response: The answer, as the client gave it.
            call: Its record in this attempt.
            recorded: What `find` returned.
        """
        if recorded is None:
            self._record(messages, options, response, call)
            return
        self._keys[call.sequence] = recorded.key
        self.calls_replayed += 1
        self.replayed_from.add(recorded.key[0])
        self.tokens_saved += (call.prompt_tokens or 0) + (call.completion_tokens or 0)

    def find_result(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the recorded result of an equal call of a tool, and forget it; None: none is."""
        call = self._take(_digest_of_call(tool, arguments)) if self._recorded else None
        return None if call is None else call.result

    def note_result(
        self, tool: str, arguments: Mapping[str, Any], result: Mapping[str, Any], elapsed_s: float
    ) -> None:
        """Note the result of a tool that must not run again; a result that is no JSON is not kept.

        Args:
            tool: The tool's name.
            arguments: As the model gave them.
            result: The fields of the `ToolResult`.
            elapsed_s: Time that the tool took; it counts as generation time.
        """
        digest = _digest_of_call(tool, arguments)
        if not self._records or digest is None or not _is_json(result):
            return
        self._add(digest, None, result, None)
        self._count(elapsed_s)

    def flush(self) -> None:
        """Send all calls that are in no frame yet; while frames wait to be sent, they wait too."""
        if not self._answered or self._is_sending or self._keep is None:
            return
        self._generated_s, self._held, self._is_sending = 0.0, 0, True
        self._keep(self._next_frame)

    def _record(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        response: ModelResponse,
        call: ModelCall,
    ) -> None:
        if not self._records:
            return
        packed = None
        if call.tokens is not None:
            packed = self._packed(call.tokens)
            if packed is None:
                return
        self._held += len(messages)
        is_much = self._held > _MOST_HELD
        digest = digest_of_request(messages, options) if is_much else None
        if is_much and digest is None:
            return
        # `packed` has the ids: as Python lists they take ten times the memory until the frame.
        bare = replace(response, prompt_token_ids=None, completion_token_ids=None, logprobs=None)
        self._add(
            digest,
            None if is_much else (messages, options),
            lambda: _values_of(bare),
            packed,
            call.sequence,
        )
        self._count((response.latency_ms or 0.0) / 1000)

    def _count(self, elapsed_s: float) -> None:
        self._generated_s += elapsed_s
        if self._generated_s >= self._settings.after_s:
            self.flush()

    def _take(self, digest: str | None) -> RecordedCall | None:
        found = self._recorded.get(digest or "")
        if not found:
            return None
        call = found.popleft()
        if not found:
            del self._recorded[call.digest]
        return call

    def _add(
        self,
        digest: str | None,
        request: tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]] | None,
        result: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        tokens: RecordedTokens | None,
        sequence: int | None = None,
    ) -> None:
        number = self._numbers
        self._numbers += 1
        if sequence is not None:
            self._keys[sequence] = (self._request.attempt_no, number)
        self._answered.append(_Answered(number, digest, request, result, tokens))

    def _packed(self, tokens: CallTokens) -> RecordedTokens | None:
        """Return tokens whose prefix is named by its place; None: that call is not recorded."""
        prefix = self._keys.get(tokens.prefix_call) if tokens.prefix_len else None
        if tokens.prefix_len and prefix is None:
            return None
        length = tokens.prefix_len * ITEM_BYTES
        return RecordedTokens(tokens.new_prompt, tokens.completion, tokens.logprobs, prefix, length)

    def _next_frame(self) -> JournalFrame | None:
        """Pack what is in no frame yet; runs in the outbox's thread."""
        # Cleared first: what is added from now on asks for another frame.
        self._is_sending = False
        calls: list[RecordedCall] = []
        while True:
            try:
                answered = self._answered.popleft()
            except IndexError:
                break
            if (call := answered.recorded(self._request.attempt_no)) is not None:
                calls.append(call)
        body = pack_calls(calls, redact=self._redactor.data)
        if not body:
            return None
        self._bytes += len(body)
        if self._bytes > self._settings.max_bytes:
            if self._records:
                log.info("The journal of %s is full; no more is kept.", self._request.label)
            self._records = False
            return None
        return JournalFrame(
            **self._request.identity,
            first=calls[0].key[1],
            n_calls=len(calls),
            body=body,
            body_bytes=len(body),
        )


def fresh_enough(recorded: ReadJournal, oldest_version: int) -> ReadJournal:
    """Return what was recorded, without calls that older weights answered."""
    calls = [
        call for call in recorded.calls if call.version is None or call.version >= oldest_version
    ]
    return recorded._replace(calls=calls)


def response_of(call: RecordedCall) -> ModelResponse:
    """Return the answer of a recorded model call, as the client gave it."""
    values = dict(call.result)
    tool_calls = tuple(NativeToolCall(*each) for each in values.pop("tool_calls", ()))
    tokens = call.tokens
    ids: dict[str, Any] = {}
    if tokens is not None:
        ids = {
            "prompt_token_ids": _unpacked("i", tokens.new_prompt),
            "completion_token_ids": _unpacked("i", tokens.completion),
            "logprobs": None if tokens.logprobs is None else _unpacked("f", tokens.logprobs),
        }
    return ModelResponse(**values, tool_calls=tool_calls, **ids)


def replay_deltas(response: ModelResponse, on_delta: OnDelta | None) -> None:
    """Pass a recorded answer on to a client that reads it as a stream, in one piece."""
    if on_delta is None:
        return
    calls = enumerate(response.tool_calls)
    on_delta(
        ResponseDelta(
            text=response.text,
            reasoning=str(response.metadata.get("reasoning") or ""),
            reasoning_field=next(
                iter(response.metadata.get("reasoning_fields", ())), "reasoning_content"
            ),
            tool_calls=tuple(ToolCallDelta(n, c.id, c.name, c.arguments) for n, c in calls),
        )
    )


def _digest_of_call(tool: str, arguments: Mapping[str, Any]) -> str | None:
    return digest_of_value(["tool", tool, arguments])


def _is_json(result: Mapping[str, Any]) -> bool:
    """Say whether a value comes back from JSON as it was: tuples and dataclasses do not."""
    try:
        return json.loads(json.dumps(result)) == result
    except (TypeError, ValueError):
        return False


def _values_of(response: ModelResponse) -> dict[str, Any]:
    values = {name: getattr(response, name) for name in _RESPONSE_FIELDS}
    calls = [(call.id, call.name, call.arguments) for call in response.tool_calls]
    return {name: value for name, value in values.items() if value not in (None, {})} | (
        {"tool_calls": calls} if calls else {}
    )


def _unpacked(kind: str, data: bytes) -> list[Any]:
    items = array(kind, data)
    if sys.byteorder == "big":
        items.byteswap()
    return items.tolist()
