"""The record of one model call of an attempt.

Made by `workers/process/model_calls.py` when the answer arrives, before the agent sees it. The text
part is stored in the body of the trajectory, the tokens in the token body beside it. Must not: hold
token ids as Python lists; 50 calls of 32,768 tokens would take 50 MB in each running attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

#: Ends of a call that was cut off from outside, so that its tokens are no sample of the policy.
ABORTED = frozenset({"abort", "aborted", "cancelled", "error"})


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of one call as the server recorded them; the prompt is stored as what is new.

    The prompt is the first `prefix_len` tokens of the prompt and completion of the call
    `prefix_call` (a sequence number), followed by `new_prompt`. Ids are packed as int32, logprobs
    as float32, both little-endian; `logprobs` is None if the server gave none.
    """

    new_prompt: bytes
    completion: bytes
    logprobs: bytes | None = None
    prefix_call: int = -1
    prefix_len: int = 0


class ModelCall(BaseModel):
    """One model call of an attempt."""

    # Bodies of earlier versions hold ids and logprobs as lists, which are not read any more.
    model_config = ConfigDict(extra="ignore")

    sequence: int
    agent: str = Field(default="", description="Label of a sub-agent; empty: the main agent.")
    response: dict[str, Any] | None = Field(
        default=None, description="The assistant message in the OpenAI format."
    )
    model: str | None = None
    endpoint: str | None = Field(default=None, description="Base URL that answered.")
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    latency_ms: float | None = None
    policy_version_before: int | None = Field(
        default=None, description="Version that the endpoint had when the call began, if known."
    )
    policy_version: int | None = Field(default=None, description="Version in the answer.")
    sampling: dict[str, Any] = Field(default={}, description="Sampling parameters as sent.")
    token_source: str | None = Field(
        default=None, description="Field of the answer in which the ids were found."
    )
    trainable: bool = Field(
        default=False, description="Whether its completion is a sample to train on."
    )
    replayed: bool = Field(
        default=False, description="Answered from the record of an earlier attempt."
    )
    tokens: Annotated[CallTokens | None, SkipValidation] = Field(
        default=None, exclude=True, repr=False
    )

    @property
    def version_min(self) -> int | None:
        """The smaller of the two versions: weights may be updated during a call."""
        if self.policy_version is None or self.policy_version_before is None:
            return self.policy_version
        return min(self.policy_version, self.policy_version_before)


def version_range(calls: Sequence[ModelCall], published: int) -> tuple[int, int]:
    """Return the smallest and the largest policy version of an attempt's calls.

    Args:
        calls: All calls of the attempt.
        published: The version that counts where a call has none, or where there is no call.
    """
    versions = [call.version_min for call in calls if call.version_min is not None]
    if len(versions) < len(calls) or not versions:
        # Calls before the first publication carry no version.
        versions.append(published)
    return min(versions), max(versions)
