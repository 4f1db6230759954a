"""The output of `rollout show rollout --tokens`: the segments of an attempt, token by token.

Ids are shown as the server recorded them; no tokenizer turns them into text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollout.output import console, safe_text

if TYPE_CHECKING:
    from rich.text import Text

    from pipeline.tokens.segments import Segment, Segments

_HEADINGS = "position        id  mask   logprob  version"
#: Colours of sampled tokens, by the smallest probability that has them.
_COLOURS = ((0.9, "green"), (0.5, "yellow"), (0.0, "red"))


def segments_document(merged: Segments) -> dict[str, Any]:
    """Return the segments as JSON values; an unknown logprob is null, an unknown version -1."""
    return {
        "segments": [_document(segment) for segment in merged.segments],
        "calls_without_ids": merged.missing,
        "calls_untrained": merged.untrained,
    }


def print_segments(merged: Segments) -> None:
    """Print a line for each trained token, and one for each run of context."""
    output = console()
    if not merged.segments:
        output.print("No token ids are stored.")
    for number, segment in enumerate(merged.segments):
        output.print(_title(segment, number), style="bold")
        output.print(_HEADINGS, style="dim")
        for line in _lines(segment):
            output.print(line, soft_wrap=True)
    for n, what in ((merged.missing, "without ids"), (merged.untrained, "not trained")):
        if n:
            output.print(f"{n} {'call' if n == 1 else 'calls'} {what}.")


def _document(segment: Segment) -> dict[str, Any]:
    return {
        "origin": segment.origin,
        "agent": segment.agent,
        "calls": list(segment.calls),
        "truncated": segment.truncated,
        "token_ids": segment.token_ids.tolist(),
        "loss_mask": segment.loss_mask.tolist(),
        "logprobs": [None if math.isnan(each) else each for each in segment.logprobs.tolist()],
        "versions": segment.versions.tolist(),
    }


def _title(segment: Segment, number: int) -> str:
    noun = "call" if len(segment.calls) == 1 else "calls"
    parts = [
        f"segment {number} ({segment.origin}): {len(segment.token_ids)} tokens",
        f"{int(segment.loss_mask.sum())} sampled in {noun} {', '.join(map(str, segment.calls))}",
        *([f"agent {segment.agent}"] if segment.agent else []),
        *(["truncated"] if segment.truncated else []),
    ]
    return safe_text(", ".join(parts))


def _lines(segment: Segment) -> Iterator[Text]:
    from rich.text import Text

    mask, ids = segment.loss_mask.tolist(), segment.token_ids.tolist()
    logprobs, versions = segment.logprobs.tolist(), segment.versions.tolist()
    position = 0
    while position < len(mask):
        if not mask[position]:
            end = next((at for at in range(position, len(mask)) if mask[at]), len(mask))
            yield _context(position, end)
            position = end
            continue
        logprob, version = logprobs[position], versions[position]
        shown = "–" if math.isnan(logprob) else f"{logprob:.4f}"
        yield Text(
            f"{position:<8}{ids[position]:>10}{1:>6}{shown:>10}"
            f"{'–' if version < 0 else version:>9}",
            style=_colour(logprob),
        )
        position += 1


def _context(start: int, end: int) -> Text:
    from rich.text import Text

    one = end == start + 1
    where = str(start) if one else f"{start}-{end - 1}"
    noun = "token" if one else "tokens"
    return Text(f"{where:<18}{0:>6}  {end - start} {noun} of context", style="dim")


def _colour(logprob: float) -> str:
    if math.isnan(logprob):
        return "magenta"
    probability = math.exp(min(logprob, 0.0))
    return next(colour for least, colour in _COLOURS if probability >= least)
