"""The model calls that gateways recorded for a remote attempt: as they travel, and put together.

A gateway turns each call into a `RecordedCall` of a journal frame; the results service makes the
calls of the trajectory from them. Several gateways may have served one attempt, and one of them may
have died before its last answer reached the agent. Must not: change what the server recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.journal import CallKey, RecordedCall, RecordedTokens
from pipeline.contract.model_call import ModelCall
from pipeline.tokens.prompt_prefixes import ITEM_BYTES, PromptPrefixes


@dataclass(frozen=True, slots=True)
class RemoteCalls:
    """The calls of a remote attempt, in the order of their answers.

    `unanswered` counts calls that are left out, because their answer never reached the agent, and
    `missing` those whose record cannot be read.
    """

    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    unanswered: int = 0
    missing: int = 0


NO_CALLS = RemoteCalls()


def recorded_call(
    call: ModelCall, key: CallKey, *, prefix: CallKey | None, identity: str, supersedes: bool
) -> RecordedCall:
    """Return a call as it travels.

    Args:
        call: As the gateway recorded it.
        key: Its own, whose number is the time of its answer.
        prefix: The key of the call that its prompt continues.
        identity: Equal for a request and its repetition.
        supersedes: Whether the request repeats one that this gateway has not seen: then another
            gateway got it, and that one's answer did not reach the agent.
    """
    tokens = None
    if call.tokens is not None:
        own = call.tokens
        n_bytes = own.prefix_len * ITEM_BYTES
        tokens = RecordedTokens(own.new_prompt, own.completion, own.logprobs, prefix, n_bytes)
    document = call.model_dump(exclude={"sequence"}, exclude_defaults=True)
    return RecordedCall(key, identity, {"call": document, "supersedes": supersedes}, tokens)


def remote_calls_of(recorded: Sequence[RecordedCall], *, missing: int = 0) -> RemoteCalls:
    """Return the calls of an attempt, `missing` of which cannot be read.

    Raises:
        MalformedMessage: A call cannot be read.
    """
    kept: list[RecordedCall] = []
    for each in sorted(recorded, key=lambda call: call.key):
        if each.result.get("supersedes"):
            lost = next((k for k in reversed(kept) if k.digest == each.digest), None)
            if lost is not None:
                kept.remove(lost)
        kept.append(each)
    prefixes = PromptPrefixes()
    calls: list[ModelCall] = []
    for sequence, each in enumerate(kept):
        try:
            call = ModelCall.model_validate({**each.result["call"], "sequence": sequence})
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedMessage("A recorded call could not be read.", why=str(error)) from error
        if (own := each.tokens) is not None:
            call.tokens = prefixes.add_packed(
                sequence, own.new_prompt, own.completion, own.logprobs
            )
        calls.append(call)
    return RemoteCalls(calls, len(recorded) - len(kept), missing)
