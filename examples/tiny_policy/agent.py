"""The plug-in that workers load: the two-turn agent of the calculator task.

The policy calls the calculator in plain text: `c37*48`. The result is the next message, and the
reply to it is the answer. A reply that calls nothing is the answer itself.
"""

from __future__ import annotations

import re

from rollout import register_agent

#: Results that the policy's vocabulary can write; all others are shown as an error.
_RESULT = re.compile(r"-?\d{1,8}")
_ERROR = "e"


@register_agent("calculator_user")
async def solve(prompt, llm, tools):
    """Ask the policy, run its calculation, and ask for the answer."""
    messages = [{"role": "user", "content": prompt["content"]}]
    reply = await llm(messages)
    if not reply.text.startswith("c"):
        return reply.text
    called = await tools["calculator"](expression=reply.text[1:])
    shown = str(called.result["result"]) if called.success else _ERROR
    messages += [
        {"role": "assistant", "content": reply.text},
        {"role": "tool", "content": shown if _RESULT.fullmatch(shown) else _ERROR},
    ]
    return (await llm(messages)).text
