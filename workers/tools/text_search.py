"""Searching files below a directory: text in them, or their names; bounded in time and memory.

Used by the search tool, in a thread. Patterns run on the `regex` engine, because its time limit
holds for any pattern. Must not: follow a link, or read anything but regular files.
"""

from __future__ import annotations

import fnmatch
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import regex

from workers.sandbox.confined_folder import ConfinedFolder

MAX_PATTERN_CHARS = 1000
MAX_FILE_BYTES = 4 * 1024**2
MAX_VISITED = 200_000
MAX_LINE_CHARS = 400
#: Folders without source code; their matches would hide the others.
SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv"})


#: A match, and the lines that show it.
_Match = tuple[dict[str, Any], list[str]]


class SearchError(ValueError):
    """An impossible search; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a search, with the names of the search tool's parameters."""

    pattern: str
    path: str = "."
    case_sensitive: bool = False
    regex: bool = False
    whole_words: bool = False
    max_results: int = 50
    file_extensions: tuple[str, ...] = ()
    context_lines: int = 0


@dataclass(slots=True)
class SearchResult:
    """The matches, and the lines that show them.

    A match has a `path`, and for text the `line` number and the `text` of the line. `notice` is the
    reason why the search ended early.
    """

    lines: list[str] = field(default_factory=list[str])
    matches: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    notice: str = ""


class _TimeUp(Exception):
    """The time of the search is over."""


class _Deadline:
    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        """Return the seconds left.

        Raises:
            _TimeUp: No time is left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise _TimeUp
        return left


def search_text(folder: ConfinedFolder, query: Query, budget_s: float) -> SearchResult:
    """Return the lines that match, each as `path:line: text`."""
    pattern, deadline = _compile(query), _Deadline(budget_s)
    return _collect(_matches_in_files(folder, query, pattern, deadline), query, budget_s)


def search_names(
    folder: ConfinedFolder, query: Query, budget_s: float, *, folders: bool
) -> SearchResult:
    """Return the files, or the directories, whose name or path matches."""
    matches, deadline = _name_matcher(query), _Deadline(budget_s)
    found = (
        ({"path": path}, [path + "/" if is_folder else path])
        for path, is_folder in _walk_names(folder, query, deadline)
        if is_folder == folders and matches(path, deadline)
    )
    return _collect(found, query, budget_s)


def _collect(matches: Iterator[_Match], query: Query, budget_s: float) -> SearchResult:
    """Collect matches up to the limits of number and time."""
    found = SearchResult()
    try:
        for match, lines in matches:
            if len(found.matches) == query.max_results:
                found.notice = f"stopped at max_results={query.max_results}"
                break
            found.matches.append(match)
            found.lines += lines
    except _TimeUp:
        found.notice = f"stopped after {budget_s:g} s; narrow the pattern or the path"
    return found


def _matches_in_files(
    folder: ConfinedFolder, query: Query, pattern: Any, deadline: _Deadline
) -> Iterator[_Match]:
    for path, fd in _files(folder, query, deadline):
        text = _read_text(fd)
        if text is None:
            continue
        lines = text.split("\n")
        for number in _matching_lines(pattern, text, deadline):
            line = lines[number - 1][:MAX_LINE_CHARS].rstrip()
            match = {"path": path, "line": number, "text": line}
            yield match, _show(path, lines, number, query.context_lines)


def _compile(query: Query) -> Any:
    if not query.pattern:
        raise SearchError("the pattern is empty")
    if len(query.pattern) > MAX_PATTERN_CHARS:
        raise SearchError(f"the pattern is longer than {MAX_PATTERN_CHARS} characters")
    source = query.pattern if query.regex else regex.escape(query.pattern, literal_spaces=True)
    if query.whole_words:
        source = rf"\b(?:{source})\b"
    flags = regex.MULTILINE | (0 if query.case_sensitive else regex.IGNORECASE)
    try:
        return regex.compile(source, flags)
    except (regex.error, RecursionError, OverflowError) as error:
        raise SearchError(f"not a regular expression: {error}") from error


def _matching_lines(pattern: Any, text: str, deadline: _Deadline) -> Iterator[int]:
    """Yield the numbers of the lines in which a match begins, each once."""
    line, counted_to, last = 1, 0, 0
    try:
        # concurrent=True lets the event loop's thread run while the engine works.
        for match in pattern.finditer(text, concurrent=True, timeout=deadline.left()):
            line += text.count("\n", counted_to, match.start())
            counted_to = match.start()
            if line != last and counted_to < len(text):
                last = line
                yield line
    except TimeoutError:
        raise _TimeUp from None


def _show(path: str, lines: list[str], number: int, context: int) -> list[str]:
    first = max(1, number - context)
    shown = enumerate(lines[first - 1 : number + context], first)
    if not context:
        return [f"{path}:{n}: {line[:MAX_LINE_CHARS].rstrip()}" for n, line in shown]
    block = [
        f"{path}:{n}{':' if n == number else '-'} {line[:MAX_LINE_CHARS].rstrip()}"
        for n, line in shown
    ]
    return [*block, "--"]


def _name_matcher(query: Query) -> Any:
    is_glob = not query.regex and any(letter in query.pattern for letter in "*?[")
    if is_glob:
        source = fnmatch.translate(query.pattern)
        flags = 0 if query.case_sensitive else regex.IGNORECASE
        pattern = regex.compile(source, flags)
    else:
        pattern = _compile(query)

    def matches(path: str, deadline: _Deadline) -> bool:
        # A pattern with a slash matches the path, any other the name.
        text = path if "/" in query.pattern else path.rsplit("/", 1)[-1]
        try:
            return pattern.search(text, concurrent=True, timeout=deadline.left()) is not None
        except TimeoutError:
            raise _TimeUp from None

    return matches


def _walk_names(
    folder: ConfinedFolder, query: Query, deadline: _Deadline
) -> Iterator[tuple[str, bool]]:
    for where, folders, files, _ in _walk(folder, query.path, deadline):
        for name in folders:
            yield where + name, True
        for name in files:
            if _has_extension(name, query):
                yield where + name, False


def _files(folder: ConfinedFolder, query: Query, deadline: _Deadline) -> Iterator[tuple[str, int]]:
    """Yield each file to search as its path and an open descriptor, closed afterwards."""
    if not stat.S_ISDIR(folder.stat(query.path).st_mode):
        with folder.open_file(query.path) as fd:
            yield query.path, fd
        return
    for where, _, files, folder_fd in _walk(folder, query.path, deadline):
        for name in files:
            if not _has_extension(name, query):
                continue
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, dir_fd=folder_fd)
            except OSError:  # a link, removed meanwhile, or not readable
                continue
            try:
                yield where + name, fd
            finally:
                os.close(fd)


def _walk(
    folder: ConfinedFolder, path: str, deadline: _Deadline
) -> Iterator[tuple[str, list[str], list[str], int]]:
    start = folder.open_folder(path)
    prefix = "" if path in (".", "") else path.rstrip("/") + "/"
    visited = 0
    try:
        for where, folders, files, fd in os.fwalk(".", dir_fd=start, follow_symlinks=False):
            deadline.left()
            folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
            visited += len(folders) + len(files)
            if visited > MAX_VISITED:
                raise SearchError(f"more than {MAX_VISITED} files; search in a directory below")
            inner = "" if where == "." else where.removeprefix("./") + "/"
            yield prefix + inner, folders, sorted(files), fd
    finally:
        os.close(start)


def _has_extension(name: str, query: Query) -> bool:
    return not query.file_extensions or name.endswith(query.file_extensions)


def _read_text(fd: int) -> str | None:
    """Return a file's text; None for binary, special and too large files."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
        return None
    with open(fd, "rb", closefd=False) as file:
        data = file.read(MAX_FILE_BYTES)
    return None if b"\0" in data[:8192] else data.decode(errors="replace")
