"""The `swe` agent: a coding agent whose result is a diff and whose reward is the task's tests.

Used by name through the registry; works in a local sandbox, a Docker container or a Kubernetes pod.
Must not: give a reward to a task without tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.agents.coding_agent import CodingAgent
from workers.agents.coding_verdict import TestVerdict
from workers.core.options import Options
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.sandbox.kinds import CONTAINER_KINDS


class SWEAgent(CodingAgent):
    """Solves an issue in a repository; the final answer is the diff.

    Args:
        *args: As `CodingAgent`.
        image: Image of the container or pod; the prompt's field `image` overrides it. With an image
            the sandbox is a Docker container unless `sandbox` names another kind.
        repository_path: Path of the repository inside the image.
        **kwargs: As `CodingAgent`; `repository` is a local directory to copy in.
    """

    options: ClassVar[Options] = {}

    def __init__(
        self,
        *args: Any,
        image: str | None = None,
        repository_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.image = image
        self.repository_path = repository_path
        if image is not None:
            kwargs.setdefault("sandbox", "docker")
        super().__init__(*args, **kwargs)
        if self.sandbox in CONTAINER_KINDS:
            self.working_directory = repository_path or self.working_directory

    def options_for(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a prompt's sandbox, its image among them.

        Raises:
            ValueError: A container without an image, or an image without a container.
        """
        image = prompt.get("image") or self.image
        if self.sandbox in CONTAINER_KINDS:
            if not image and "image" not in self.sandbox_options:
                raise ValueError(
                    f"a sandbox of kind {self.sandbox} needs an image: give the agent's option or "
                    "the prompt's field 'image'"
                )
            return {**self.sandbox_options, **({"image": image} if image else {})}
        if image:
            raise ValueError(
                f"the task names the image {image!r}, but the sandbox is {self.sandbox!r}: set the "
                "agent's option sandbox to 'docker' or 'k8s'"
            )
        return self.sandbox_options

    def conclude(self, verdict: TestVerdict | None, trajectory: Trajectory) -> None:
        """Record the verdict, and the diff as the final answer.

        The stop reason stays; after a limit the diff is the work so far.
        """
        reason = self.decide_stop(trajectory) or "answered"
        super().conclude(verdict, trajectory)
        trajectory.metadata["summary"] = trajectory.get_final_response()
        diff = trajectory.metadata.get("diff", "")
        trajectory.metadata["stop_reason"] = reason
        trajectory.add_step(TrajectoryStep(StepType.FINAL_ANSWER, diff, {"chat_message": None}))
