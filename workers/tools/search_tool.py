"""The `search` tool: find text in files, files, or directories below one directory.

Used by name through the tool registry, which lets it search the files of the trajectory's other
tools. The searches are those of `text_search.py`. Must not: run longer than its time limit,
for any pattern.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from workers.core.options import Options
from workers.core.sync_call import call_sync_or_async
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema
from workers.sandbox.confined_folder import ConfinedFolder
from workers.sandbox.shared import SANDBOX_OPTIONS, SHARED
from workers.tools.sandbox_tool import SandboxTool
from workers.tools.text_search import Query, SearchError, SearchResult, search_names, search_text

DEFAULT_RESULTS = 50
MOST_RESULTS = 1000
DEFAULT_TIMEOUT_S = 10.0

_SEARCHES: dict[str, Callable[[ConfinedFolder, Query, float], SearchResult]] = {
    "search_text": search_text,
    "search_files": partial(search_names, folders=False),
    "search_dir": partial(search_names, folders=True),
}
_SCHEMA = create_openai_tool_schema(
    "search",
    "search_text: lines of files that match a pattern. search_files: files by name. "
    "search_dir: directories by name. Names may use * and ?.",
    {
        "command": {
            "type": "string",
            "enum": [*_SEARCHES],
            "description": "What to search; search_text if left out.",
        },
        "pattern": {"type": "string", "description": "What to look for."},
        "path": {"type": "string", "description": "File or directory to search; the root if none."},
        "case_sensitive": {"type": "boolean", "description": "Default false."},
        "regex": {"type": "boolean", "description": "The pattern is a regular expression."},
        "whole_words": {"type": "boolean", "description": "Match whole words only."},
        "max_results": {"type": "integer", "description": "Most matches returned."},
        "file_extensions": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Only files with these endings, such as .py.",
        },
        "context_lines": {"type": "integer", "description": "Lines shown around each match."},
    },
    ["pattern"],
)


class SearchTool(SandboxTool):
    """Searches files.

    Args:
        config: `root` (directory to search; by default the working directory, or with `sandbox`
            the trajectory's sandbox), `max_results` (default number of matches, 50), `timeout`
            (seconds of one search, 10), and as for `bash_executor` `sandbox`, `limits`, `options`.
    """

    options: ClassVar[Options] = {**SANDBOX_OPTIONS, "max_results": int, "timeout": float}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, _SCHEMA)
        is_configured = any(self.config.get(key) for key in ("root", "sandbox"))
        self._is_local = self.sandbox_settings.is_plain_folder or not is_configured
        self._max_results = int(self.config.get("max_results", DEFAULT_RESULTS))
        self._timeout_s = float(self.config.get("timeout", DEFAULT_TIMEOUT_S))

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Search; a search without a match is a success.

        The result has the `pattern`, the `matches` as in `SearchResult`, and whether they are
        `complete`.

        Raises:
            SandboxFailure: The sandbox would not start or died.
        """
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        folder = await self._folder(instance_id)
        if folder is None:
            error = "search works on local directories; use bash_executor with grep or find"
            return ToolResult(success=False, error=error)
        query = self._query(parameters)
        search = _SEARCHES[parameters.get("command", "search_text")]
        try:
            found = await call_sync_or_async(search, folder, query, self._timeout_s)
        except SearchError as error:
            return ToolResult(success=False, error=str(error))
        except OSError as error:
            return ToolResult(success=False, error=f"{query.path}: {error.strerror or error}")
        if not found.matches and not found.notice and await call_sync_or_async(_is_empty, folder):
            found.lines = ["nothing found: the directory that is searched has no files"]
        return _as_tool_result(query.pattern, found)

    async def _folder(self, instance_id: str) -> ConfinedFolder | None:
        if self._is_local:
            return ConfinedFolder(self.sandbox_settings.root or ".")
        return (await SHARED.join(self, instance_id, self.sandbox_settings)).local_files

    def _query(self, given: Mapping[str, Any]) -> Query:
        limit = int(given.get("max_results") or self._max_results)
        return Query(
            pattern=given["pattern"],
            path=given.get("path") or ".",
            case_sensitive=bool(given.get("case_sensitive")),
            regex=bool(given.get("regex")),
            whole_words=bool(given.get("whole_words")),
            max_results=max(1, min(limit, MOST_RESULTS)),
            file_extensions=tuple(
                extension if extension.startswith(".") else f".{extension}"
                for extension in given.get("file_extensions", ())
            ),
            context_lines=max(0, min(int(given.get("context_lines") or 0), 20)),
        )


def _is_empty(folder: ConfinedFolder) -> bool:
    with os.scandir(folder.root) as entries:
        return next(entries, None) is None


def _as_tool_result(pattern: str, found: SearchResult) -> ToolResult:
    lines = found.lines or ["nothing found"]
    if found.notice:
        lines = [*lines, f"[{found.notice}]"]
    return ToolResult(
        success=True,
        result={"pattern": pattern, "matches": found.matches, "complete": not found.notice},
        shown="\n".join(lines),
        metrics={"matches": len(found.matches), "complete": not found.notice},
    )
