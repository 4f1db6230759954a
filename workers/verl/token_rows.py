"""Trajectories of the agent library as rows of a prompt and a response in tokens.

Called for `AgenticRollout.generate_sequences`, which pads them by `pipeline/tokens/padding.py`. A
row has the token ids that the server recorded at sampling; the text is tokenised only if a call has
none. Must not: mix the two in one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.tokens.segments import merge_calls
from pipeline.tokens.token_body import SampledCall
from workers.core.trajectory import Trajectory

PLAIN_TEMPLATE = "{role}: {content}\n"


@dataclass
class TokenRow:
    """One trajectory in tokens; `response_mask` is 1 on the tokens that the model sampled.

    `response_logprobs` is None unless every sampled token has one.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] | None = None
    is_recorded: bool = False

    def extend(self, ids: Sequence[int], *, sampled: bool) -> None:
        """Append tokens of a text, which have no logprobs, to the response."""
        self.response_ids += ids
        self.response_mask += [int(sampled)] * len(ids)


def token_row(
    trajectory: Trajectory, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()
) -> TokenRow:
    """Return a trajectory in tokens, from the recorded ids if they are complete and consistent.

    Args:
        trajectory: A finished one.
        tokenizer: Tokenises the text where ids are missing.
        tools: The tools that were offered to the model, in the OpenAI format; chat templates write
            them into the prompt.
    """
    chat = _Chat(tokenizer, tools)
    return _recorded_row(trajectory) or _text_row(trajectory.get_messages(), chat)


def prompt_row(
    messages: Sequence[dict[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()
) -> TokenRow:
    """Return the row of a trajectory without a reply."""
    chat = _Chat(tokenizer, tools)
    return TokenRow(chat.ids(chat.text(messages, ask=True)))


def _recorded_row(trajectory: Trajectory) -> TokenRow | None:
    """Return the one segment of the recorded calls; None if a call has no ids, or for several."""
    calls: list[SampledCall] = []
    for number, step in enumerate(step for step in trajectory.steps if "usage" in step.metadata):
        prompt = step.metadata.get("prompt_token_ids")
        completion = step.metadata.get("completion_token_ids")
        if prompt is None or not completion:
            return None
        has_logprobs = step.log_probs is not None and len(step.log_probs) == len(completion)
        calls.append(
            SampledCall(
                sequence=number,
                prompt=np.array(prompt, np.int32),
                completion=np.array(completion, np.int32),
                logprobs=np.array(step.log_probs, np.float32) if has_logprobs else None,
            )
        )
    segments = merge_calls(calls).segments
    if len(segments) != 1:
        return None
    (segment,) = segments
    start = segment.prompt_length
    return TokenRow(
        segment.token_ids[:start].tolist(),
        segment.token_ids[start:].tolist(),
        segment.loss_mask[start:].tolist(),
        segment.logprobs[start:].tolist() if segment.has_logprobs else None,
        is_recorded=True,
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation as text and as tokens, by the tokenizer's template."""

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]]

    def text(self, messages: Sequence[dict[str, Any]], *, ask: bool) -> str:
        if not messages:
            return ""
        if getattr(self.tokenizer, "chat_template", None):
            offered = {"tools": list(self.tools)} if self.tools else {}
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask, **offered
            )
        text = "".join(_plain(message) for message in messages)
        return f"{text}assistant: " if ask else text

    def ids(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except TypeError:  # a tokenizer without special tokens to add
            return list(self.tokenizer.encode(text))


def _text_row(messages: list[dict[str, Any]], chat: _Chat) -> TokenRow:
    """Tokenise a conversation; the messages before the model's first reply are the prompt.

    The texts of the replies count as sampled, the template's tokens around them do not.
    """
    first = next(
        (n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages)
    )
    sent = chat.text(messages[:first], ask=True)
    row = TokenRow(chat.ids(sent))
    for number in range(first, len(messages)):
        is_last = number == len(messages) - 1
        ask = not is_last and messages[number + 1]["role"] == "assistant"
        text = chat.text(messages[: number + 1], ask=ask)
        # A template that rewrites earlier turns (removes reasoning) gives no common prefix.
        added = text[len(sent) :] if text.startswith(sent) else _plain(messages[number])
        sent = text
        if messages[number]["role"] == "assistant":
            _extend_with_reply(row, added, messages[number], chat)
        else:
            row.extend(chat.ids(added), sampled=False)
    return row


def _extend_with_reply(row: TokenRow, added: str, message: dict[str, Any], chat: _Chat) -> None:
    start, end = _sampled_part(added, message, getattr(chat.tokenizer, "eos_token", None))
    row.extend(chat.ids(added[:start]), sampled=False)
    row.extend(chat.ids(added[start:end]), sampled=True)
    row.extend(chat.ids(added[end:]), sampled=False)


def _sampled_part(added: str, message: dict[str, Any], end_token: str | None) -> tuple[int, int]:
    """Return the part of a reply's text, as the template writes it, that the model sampled.

    The template writes the end token, but the model sampled it. Tool calls stand between the
    content and the end token.
    """
    content = message.get("content") or ""
    start = added.find(content) if content else -1
    if start >= 0 and not message.get("tool_calls"):
        end = start + len(content)
        is_ended = end_token and added.startswith(end_token, end)
        return start, end + len(end_token) if end_token and is_ended else end
    # With calls alone, or content that the template rewrites, all up to the end token is sampled.
    last = added.rfind(end_token) if end_token else -1
    return max(start, 0), last + len(end_token) if end_token and last >= 0 else len(added)


def _plain(message: dict[str, Any]) -> str:
    return PLAIN_TEMPLATE.format(role=message["role"], content=message.get("content") or "")
