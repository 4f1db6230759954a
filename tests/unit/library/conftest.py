from collections.abc import Callable, Iterable
from typing import Any

import pytest

from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.registry import clear_registry
from workers.core.tool_registry import get_global_tool_registry


class ScriptedModel:
    """Answers with the scripted replies in order; an exception among them is raised."""

    def __init__(self, replies: Iterable[Any]) -> None:
        self.replies = list(replies)
        self.requests: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []

    async def __call__(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        self.requests.append([dict(message) for message in messages])
        self.options.append(options)
        if not self.replies:
            raise AssertionError("the script has no more replies")
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply


@pytest.fixture
def script() -> Callable[..., ScriptedModel]:
    return lambda *replies: ScriptedModel(replies)


@pytest.fixture
def calls() -> Callable[..., ModelResponse]:
    """A native reply: `calls(("add", '{"a": 1}'), text="...")`."""

    def make(*wanted: tuple[str, str], text: str = "", **options: Any) -> ModelResponse:
        native = tuple(
            NativeToolCall(f"call_{number}", name, arguments)
            for number, (name, arguments) in enumerate(wanted)
        )
        return ModelResponse(text, native, **options)

    return make


@pytest.fixture(autouse=True)
def _fresh_registries():
    yield
    clear_registry()
    get_global_tool_registry().clear_registry()
