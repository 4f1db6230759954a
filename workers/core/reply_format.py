"""`ReplyFormat`: the rules by which an agent reads the replies of its model.

Each agent makes its own; `reply_parser` and `labelled_text` read replies by it. Must not: read a
reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workers.core.call_formats import AUTO, Tools
from workers.core.trajectory import StepType


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The rules by which an agent reads its replies.

    Args:
        unlabelled: Kind of step for a text without labels.
        tools: The offered tools; without any, the text is not searched for calls.
        tool_format: The format of calls in the text, one of `call_formats.TOOL_FORMATS`.
        native_tools: Whether the tools were offered natively. Calls found in the text are then
            kept as native calls in the conversation, so that the server's chat template writes
            them and their results in the model's own format.
    """

    unlabelled: StepType = StepType.THOUGHT
    tools: Tools = field(default_factory=dict[str, Any])
    tool_format: str = AUTO
    native_tools: bool = False
