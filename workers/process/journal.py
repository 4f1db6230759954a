"""The journal of one attempt: recorded calls that it replays, and its own calls for the next one.

`ModelCalls` looks each call up here and adds each answer; tools that must not run again do the same
with their results. Frames are packed in the outbox's thread. A rollout whose calls take less than
`journal.after_s` sends none, and then no request's digest is computed. Must not: raise, or delay a
call.
"""

from __future__ import annotations

import json
import logging
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
from workers.core.model_response import ModelResponse
from workers.process.recorded_answers import values_of

log = logging.getLogger(__name__)

#: Makes a frame when it is sent; None: there is nothing to send.
MakeFrame = Callable[[], JournalFrame | None]

NOTHING_RECORDED = ReadJournal([], 0)

#: Messages of requests that are held until their frame is packed; digests take less memory.
_MOST_HELD = 256


@dataclass(slots=True)
class _Answered:
    """A call that is in no frame yet; a digest or result is computed when the call is packed."""

    number: int
    digest: Callable[[], str | None] | str | None
    result: Callable[[], Mapping[str, Any]] | Mapping[str, Any]
    tokens: RecordedTokens | None

    def recorded(self, attempt_no: int) -> RecordedCall | None:
        digest = self.digest() if callable(self.digest) else self.digest
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
        #: By a call's sequence number in this attempt, the key of its record.
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
        """Remove and return the recorded answer to an equal request; None: there is none.

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
            if self._records:
                self._record(messages, options, response, call)
            return
        self._keys[call.sequence] = recorded.key
        self.calls_replayed += 1
        self.replayed_from.add(recorded.key[0])
        self.tokens_saved += (call.prompt_tokens or 0) + (call.completion_tokens or 0)

    def find_result(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Remove and return the recorded result of an equal call of a tool; None: there is none."""
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
        self._add(digest, result, None, elapsed_s)

    def flush(self) -> None:
        """Send all calls that are in no frame yet; only one frame at a time waits to be sent."""
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
        packed = None
        if call.tokens is not None:
            packed = self._packed(call.tokens)
            if packed is None:
                return

        def digest() -> str | None:
            return digest_of_request(messages, options)

        self._held += len(messages)
        self._keys[call.sequence] = (self._request.attempt_no, self._numbers)
        # `packed` has the ids: Python lists of them take ten times the memory.
        bare = replace(response, prompt_token_ids=None, completion_token_ids=None, logprobs=None)
        self._add(
            digest() if self._held > _MOST_HELD else digest,
            lambda: values_of(bare),
            packed,
            (response.latency_ms or 0.0) / 1000,
        )

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
        digest: Callable[[], str | None] | str | None,
        result: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
        tokens: RecordedTokens | None,
        elapsed_s: float,
    ) -> None:
        self._answered.append(_Answered(self._numbers, digest, result, tokens))
        self._numbers += 1
        self._generated_s += elapsed_s
        if self._generated_s >= self._settings.after_s:
            self.flush()

    def _packed(self, tokens: CallTokens) -> RecordedTokens | None:
        """Return tokens that name the call of their prefix by its key; None: it is not recorded."""
        prefix = self._keys.get(tokens.prefix_call) if tokens.prefix_len else None
        if tokens.prefix_len and prefix is None:
            return None
        length = tokens.prefix_len * ITEM_BYTES
        return RecordedTokens(tokens.new_prompt, tokens.completion, tokens.logprobs, prefix, length)

    def _next_frame(self) -> JournalFrame | None:
        """Pack the calls that are in no frame yet; runs in the outbox's thread."""
        # Cleared first, so that a call that is added from now on requests another frame.
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
                log.info(
                    "The journal of %s is full; no more calls are recorded.", self._request.label
                )
            self._records = False
            return None
        return JournalFrame(
            **self._request.identity,
            first=calls[0].key[1],
            n_calls=len(calls),
            body=body,
            body_bytes=len(body),
        )


def _digest_of_call(tool: str, arguments: Mapping[str, Any]) -> str | None:
    return digest_of_value(["tool", tool, arguments])


def _is_json(result: Mapping[str, Any]) -> bool:
    """Say whether a value comes back from JSON as it was: tuples and dataclasses do not."""
    try:
        return json.loads(json.dumps(result)) == result
    except (TypeError, ValueError):
        return False
