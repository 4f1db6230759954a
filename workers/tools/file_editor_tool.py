"""The `file_editor` tool: view and edit files below one directory.

Used by name through the tool registry. The directory is the configured `root`, else that of the
trajectory's sandbox, which all its tools share. Must not: follow a path or a link out of the
directory (`workers/sandbox/confined_folder.py` prevents it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from workers.core.options import Options
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema
from workers.sandbox.files import Files
from workers.sandbox.shared import SANDBOX_OPTIONS, SHARED
from workers.tools.sandbox_tool import SandboxTool
from workers.tools.text_edits import (
    EditError,
    insert_lines,
    numbered,
    replace_once,
    select_lines,
    show_around,
)

DEFAULT_VIEW_CHARS = 16_000
MAX_UNDO = 20

_SCHEMA = create_openai_tool_schema(
    "file_editor",
    "View and edit text files. view: a file with line numbers, or a directory two levels deep. "
    "create: write a new file. str_replace: replace old_str, which must occur exactly once. "
    "insert: put new_str after line insert_line. undo_edit: take back the last edit of a file.",
    {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
            "description": "What to do.",
        },
        "path": {"type": "string", "description": "The file or directory, relative to the root."},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "view: first and last line, from 1; -1 is the end of the file.",
        },
        "file_text": {"type": "string", "description": "create: the whole content."},
        "old_str": {
            "type": "string",
            "description": "str_replace: the text to replace, exactly as in the file, with enough "
            "of its surroundings to occur once.",
        },
        "new_str": {"type": "string", "description": "str_replace, insert: the new text."},
        "insert_line": {
            "type": "integer",
            "description": "insert: the line after which to insert; 0 is the beginning.",
        },
    },
    ["command", "path"],
)


class FileEditorTool(SandboxTool):
    """Views and edits files.

    Args:
        config: `root` (directory to work in; without it, the trajectory's sandbox), `max_chars`
            (most characters shown at once, 16,000), and as for `bash_executor` `sandbox`,
            `limits`, `options`.
    """

    options: ClassVar[Options] = {**SANDBOX_OPTIONS, "max_chars": int}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, _SCHEMA)
        self._view_chars = int(self.config.get("max_chars", DEFAULT_VIEW_CHARS))

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """View or change one file; a failed command changes nothing.

        The result has the `path`, and the `content` of a view or the `message` of a change.

        Raises:
            SandboxFailure: The sandbox would not start or died.
        """
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        state = self.instance_state(instance_id)
        path = parameters["path"]
        # One edit at a time, because each edit reads the file that the previous one wrote.
        async with state.setdefault("lock", asyncio.Lock()):
            try:
                files = await SHARED.files(self, instance_id, self.sandbox_settings)
                text = await self._execute(files, state.setdefault("undo", {}), parameters)
            except EditError as error:
                return ToolResult(success=False, error=f"{path}: {error}")
            except OSError as error:
                return ToolResult(success=False, error=f"{path}: {error.strerror or error}")
        kind = "content" if parameters["command"] == "view" else "message"
        return ToolResult(success=True, result={"path": path, kind: text}, shown=text)

    async def _execute(
        self, files: Files, undo: dict[str, list[bytes | None]], given: Mapping[str, Any]
    ) -> str:
        path, command = given["path"], given["command"]
        if command == "view":
            return await self._view(files, path, given.get("view_range"))
        if command == "undo_edit":
            return await self._undo(files, undo, path)
        old = await _read_or_none(files, path)
        if command == "create":
            new, at = _required(given, "file_text"), 0
        elif old is None:
            raise EditError("there is no such file; use create to make it")
        elif command == "str_replace":
            old_str, new_str = _required(given, "old_str"), given.get("new_str", "")
            new, at = replace_once(_decode(old), old_str, new_str)
        else:
            line = int(_required(given, "insert_line"))
            new, at = insert_lines(_decode(old), line, _required(given, "new_str"))
        data = new.encode("utf-8", "surrogateescape")
        await files.write(path, data)
        history = undo.setdefault(path, [])
        history.append(old)
        del history[:-MAX_UNDO]
        if command == "create":
            return f"{'Replaced' if old is not None else 'Created'} {path} ({len(data)} bytes)."
        return f"Edited {path}:\n{show_around(new, at)}"

    async def _view(self, files: Files, path: str, view_range: list[int] | None) -> str:
        if await files.is_folder(path):
            if view_range:
                raise EditError("view_range is for files; the path is a directory")
            names = await files.list(path, 2)
            return self._cut("\n".join(names) or "(empty directory)")
        text = _decode(await files.read(path))
        first, lines = select_lines(text, view_range)
        return self._cut(numbered(lines, first) or "(empty file)")

    async def _undo(self, files: Files, undo: dict[str, list[bytes | None]], path: str) -> str:
        history = undo.get(path)
        if not history:
            raise EditError("there is no edit of this file to undo")
        previous = history.pop()
        if previous is None:
            await files.remove(path)
            return f"Removed {path}, which the undone edit had created."
        await files.write(path, previous)
        return f"Took back the last edit of {path}."

    def _cut(self, text: str) -> str:
        if len(text) <= self._view_chars:
            return text
        rest = len(text) - self._view_chars
        return f"{text[: self._view_chars]}\n[... {rest} characters cut; use view_range ...]"


def _required(given: Mapping[str, Any], name: str) -> Any:
    if (value := given.get(name)) is None:
        raise EditError(f"{given['command']} needs the parameter {name}")
    return value


async def _read_or_none(files: Files, path: str) -> bytes | None:
    try:
        return await files.read(path)
    except FileNotFoundError:
        return None


def _decode(data: bytes) -> str:
    if b"\0" in data[:8192]:
        raise EditError("the file is binary")
    # surrogateescape keeps bytes that are not UTF-8 through an edit elsewhere in the file.
    return data.decode("utf-8", "surrogateescape")
