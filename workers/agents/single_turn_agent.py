"""The `single_turn` agent: one model call, whose text is the answer.

Used by name through the registry. Must not: add instructions of its own to the prompt.
"""

from __future__ import annotations

from typing import Any, ClassVar

from workers.core.base_agent import BaseAgent
from workers.core.conversation import begin_trajectory, content_chars
from workers.core.interaction import interacting, respond_to_answer
from workers.core.model_response import ModelResponse
from workers.core.options import Options
from workers.core.reply_parser import whole_reply
from workers.core.trajectory import Trajectory


class SingleTurnAgent(BaseAgent):
    """One question and one answer; with interactions, one answer per turn."""

    options: ClassVar[Options] = {}

    def create_system_prompt(self) -> str:
        """Return no instructions: the prompt is sent as it is."""
        return ""

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Ask the model once, see `BaseAgent.run_trajectory`."""
        trajectory = begin_trajectory(prompt, request_id, kwargs.get("trajectory"))
        async with interacting(self.interactions, trajectory):
            while True:
                messages = self.format_messages_for_llm(trajectory)
                response = await self.call_llm(llm_generate_func, messages, trajectory)
                trajectory.add_step(whole_reply(response, content_chars(messages)))
                if not await self._has_next_turn(response, trajectory):
                    break
        self.finalize_trajectory(trajectory)
        return trajectory

    async def _has_next_turn(self, response: ModelResponse, trajectory: Trajectory) -> bool:
        if response.finish_reason == "length":
            trajectory.metadata["stop_reason"] = "max_tokens"
            return False
        if not self.interactions or not await respond_to_answer(self.interactions, trajectory):
            return False
        return self.should_continue(trajectory)
