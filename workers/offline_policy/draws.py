"""The offline policy's seeded decisions: which answers are wrong, which calls fail.

Every decision is a pure function of the seed and the request. The order of calls has no influence,
so a test can predict the result of a run. Must not: keep state.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b

#: A call fails at most this often in a row at any rate, so that retries succeed.
MAX_FAILURES_IN_A_ROW = 3


class Mishap(StrEnum):
    """A failure that happens once in the conversation of one sample."""

    RATE_LIMIT = "rate_limit"  #: the first call answers 429
    SERVER_ERROR = "server_error"  #: the first call answers 500
    STALL = "stall"  #: the first call answers late
    MALFORMED_CALL = "malformed_call"  #: the first tool call's arguments do not parse
    TOOL_ERROR = "tool_error"  #: the first tool call makes the tool fail
    BAD_OUTPUT = "bad_output"  #: the first answer follows no protocol
    BAD_REQUEST = "bad_request"  #: every call answers 400: the rollout becomes an error rollout


# Cumulative shares of the samples that have a mishap.
_MISHAP_SHARES = (
    (0.22, Mishap.RATE_LIMIT),
    (0.44, Mishap.SERVER_ERROR),
    (0.50, Mishap.STALL),
    (0.62, Mishap.MALFORMED_CALL),
    (0.76, Mishap.TOOL_ERROR),
    (0.90, Mishap.BAD_OUTPUT),
    (1.00, Mishap.BAD_REQUEST),
)


def draw(seed: int, purpose: str, prompt_text: str, sample_key: object, *more: object) -> float:
    """Return a number in [0, 1) that depends on the arguments alone."""
    text = "\x1f".join([str(seed), purpose, prompt_text, str(sample_key), *map(str, more)])
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    # 53 bits, the precision of a float, so that the result stays below 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def expected_is_wrong(seed: int, prompt_text: str, sample_key: object, rate: float) -> bool:
    """Say whether the offline policy answers this sample of this prompt wrongly.

    Args:
        seed: The server's `--seed`.
        prompt_text: The answer key's question as in the file, stripped; without an answer key, the
            stripped text of the first user message.
        sample_key: The request's `seed` (in the pipeline: the run's seed and the rollout's index),
            else its `user` (in the pipeline: the rollout's label, `math7-g000013-r3`), else the
            number of earlier requests with this prompt.
        rate: The server's `--wrong`.
    """
    return draw(seed, "wrong", prompt_text, sample_key) < rate


def wrong_by(seed: int, prompt_text: str, sample_key: object) -> int:
    """Return how far off a wrong answer is: 1 to 9."""
    return 1 + int(draw(seed, "wrong_by", prompt_text, sample_key) * 9)


def failure_of_call(
    seed: int, call_key: tuple[str, object, int], nth: int, rate: float
) -> Mishap | None:
    """Return the failure of the nth identical call (from 0): a 429, a 500 or none.

    Args:
        seed: The server's `--seed`.
        call_key: Prompt text, sample key, and number of messages: one call of one sample.
        nth: Number of earlier failures of the same call.
        rate: The server's `--errors`.
    """
    prompt_text, sample_key, n_messages = call_key
    if nth >= MAX_FAILURES_IN_A_ROW:
        return None
    value = draw(seed, "error", prompt_text, sample_key, n_messages, nth)
    if value >= rate:
        return None
    return Mishap.RATE_LIMIT if value < rate / 2 else Mishap.SERVER_ERROR


def mishap_of_sample(seed: int, prompt_text: str, sample_key: object, rate: float) -> Mishap | None:
    """Return the mishap of this sample, if any."""
    value = draw(seed, "mishap", prompt_text, sample_key)
    if value >= rate:
        return None
    share = value / rate
    return next(mishap for limit, mishap in _MISHAP_SHARES if share < limit)
