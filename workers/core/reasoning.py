"""Split a model's reply into its reasoning and its output.

Used by `reply_parser`: labels, calls and drafts inside the reasoning are no actions and no answers.
Must not: read the output, or raise for any text of a model.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Opening and closing marks of reasoning, and models that write them: <think> (Qwen, DeepSeek, GLM,
# Kimi), [THINK] (Magistral), <seed:think> (Seed-OSS), <|START_THINKING|> (Command A),
# \u25c1think\u25b7 (Kimi-VL); the others are written by models that were asked for them.
_MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
}
_OPENING = re.compile("|".join(map(re.escape, _MARKS)))
_CLOSING = re.compile("|".join(map(re.escape, _MARKS.values())))

# Harmony (gpt-oss) writes messages on channels. `analysis` is reasoning; a message with a recipient
# (`to=`) is a call, which stays in the output with its header.
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?([^<\n]{0,200})<\|channel\|>\s{0,4}(\w+)([^<\n]{0,200})"
    r"(?:<\|constrain\|>[^<\n]{0,40})?<\|message\|>"
)
_TRAILER = re.compile(r"<\|(?:end|return)\|>|(?=<\|(?:call|start)\|>)")
# The same text after a server has removed its special tokens.
_BARE_ANALYSIS = re.compile(r"\s{0,8}analysis")
_BARE_OUTPUT = re.compile(r"assistant(?:final|(?=commentary))")
_MOST_END_CHARS = 60
# Marks of the end of a turn, where a server leaves them in the text.
_END_OF_TURN = re.compile(
    r"\s*(?:<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|return|end|END_OF_TURN_TOKEN)\|>"
    "|</s>|<end_of_turn>|<\uff5cend\u2581of\u2581sentence\uff5c>)\\s*\\Z"
)


class Output(NamedTuple):
    """A reply's text without its reasoning and marks of its end, and the reasoning."""

    text: str
    reasoning: str
    segments: tuple[tuple[int, int], ...]  #: begins of kept parts: in `text`, and in the reply

    def origin(self, end: int) -> int:
        """Return the position in the reply that corresponds to the end of a part of `text`."""
        at, in_reply = 0, 0
        for segment_at, segment_in_reply in self.segments:
            if segment_at < end:
                at, in_reply = segment_at, segment_in_reply
        return in_reply + end - at


class _Removed(NamedTuple):
    start: int
    end: int
    reasoning: str = ""


def split_reasoning(reply: str) -> Output:
    """Return the output and the reasoning of a reply.

    Reasoning that is never closed extends to the end of the reply. A closing mark without an
    opening one ends reasoning that the chat template had opened.
    """
    if "<|channel|>" in reply:
        removed = _harmony_parts(reply)
    elif _BARE_ANALYSIS.match(reply) and (output := _BARE_OUTPUT.search(reply)):
        removed = [_Removed(0, output.end(), reply[: output.start()].strip()[len("analysis") :])]
    else:
        removed = _marked_parts(reply)
    at = removed[-1].end if removed else 0
    if end_of_turn := _END_OF_TURN.search(reply, max(at, len(reply) - _MOST_END_CHARS)):
        removed.append(_Removed(*end_of_turn.span()))
    kept: list[str] = []
    segments: list[tuple[int, int]] = []
    at = length = 0
    for part in [*removed, _Removed(len(reply), len(reply))]:
        if part.start > at:
            segments.append((length, at))
            kept.append(reply[at : part.start])
            length += part.start - at
        at = part.end
    reasoning = "\n\n".join(part.reasoning for part in removed if part.reasoning)
    return Output("".join(kept), reasoning, tuple(segments))


def _marked_parts(reply: str) -> list[_Removed]:
    removed: list[_Removed] = []
    at = 0
    closing, opening = _CLOSING.search(reply), _OPENING.search(reply)
    if closing and (opening is None or closing.start() < opening.start()):
        at = closing.end()
        removed.append(_Removed(0, at, reply[: closing.start()].strip()))
    while opening := _OPENING.search(reply, at):
        mark = _MARKS[opening.group()]
        close_at = reply.find(mark, opening.end())
        inner_end = close_at if close_at >= 0 else len(reply)
        at = close_at + len(mark) if close_at >= 0 else len(reply)
        removed.append(_Removed(opening.start(), at, reply[opening.end() : inner_end].strip()))
    return removed


def _harmony_parts(reply: str) -> list[_Removed]:
    removed: list[_Removed] = []
    at = 0
    while header := _HEADER.search(reply, at):
        trailer = _TRAILER.search(reply, header.end())
        end, at = trailer.span() if trailer else (len(reply), len(reply))
        if "to=" in header[1] or "to=" in header[3]:
            continue
        if header[2] == "analysis":
            removed.append(_Removed(header.start(), at, reply[header.end() : end].strip()))
        else:
            removed += [_Removed(header.start(), header.end()), _Removed(end, at)]
    return removed
