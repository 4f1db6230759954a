"""The formats in which model families write tool calls as text.

Used by `text_calls`. The facts are those of the models' published chat templates. Must not: decide
which text is a call and which an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workers.core.call_parser import (
    CallParseError,
    ParsedCall,
    find_call_end,
    parse_call,
    parse_json_arguments,
    parse_value,
)
from workers.core.text_arguments import read_glm_arguments, read_xml_arguments
from workers.core.tool_schemas import OpenAIFunctionToolSchema

#: The offered tools by name; their schemas give the types of arguments that are written as text.
Tools = Mapping[str, OpenAIFunctionToolSchema]

AUTO = "auto"

_NAME_KEYS = ("name", "function", "tool_name", "tool", "action", "recipient_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "action_input", "tool_input", "input")
_NAMESPACES = ("functions.", "default_api.", "tools.", "tool.")


class FoundCalls(NamedTuple):
    """Calls as written, and the position behind the last of them."""

    calls: list[ParsedCall]
    end: int


_Reader = Callable[[str, re.Match[str], Tools], FoundCalls]


class CallFormat(NamedTuple):
    """A way to write calls: `opening` matches up to where `read` begins, `closing` the end."""

    opening: re.Pattern[str]
    read: _Reader
    closing: re.Pattern[str]


def tool_name(written: str, tools: Tools) -> str:
    """Return the agent's name of a tool: without namespaces, call numbers and `.call`.

    Without offered tools the name stays as written.
    """
    if not tools:
        return written
    name = written.strip().strip("\"'")
    if name in tools:
        return name
    name = re.sub(r":\d{1,6}$", "", name).removesuffix(".call")
    for namespace in _NAMESPACES:
        name = name.removeprefix(namespace)
    return name


def bound_call(call: ParsedCall, tools: Tools) -> ParsedCall:
    """Return a call with the agent's name of its tool, and a name for each argument.

    Raises:
        CallParseError: The tool has fewer parameters, or an argument is given twice.
    """
    name = tool_name(call.name, tools)
    schema = tools.get(name)
    names = list(schema.function.parameters.properties) if schema else []
    return call._replace(name=name).bind(names)


def _named(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise CallParseError('the call names no tool; write {"name": ..., "arguments": {...}}')
    return name


def calls_in_json(value: Any) -> list[ParsedCall]:
    """Return the calls of a JSON value: one call, a list of calls, or the API's own form."""
    if isinstance(value, list):
        return [call for item in value for call in calls_in_json(item)]
    if not isinstance(value, dict):
        raise CallParseError("a call is a JSON object with the tool's name and its arguments")
    if isinstance(inner := value.get("tool_calls") or value.get("tool_uses"), list):
        return calls_in_json(inner)
    if isinstance(inner := value.get("function"), dict):
        return calls_in_json(inner)
    name = next((value[key] for key in _NAME_KEYS if key in value), None)
    given = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if isinstance(given, str):
        given = parse_json_arguments(given)
    if not isinstance(given, dict):
        raise CallParseError(f"the arguments of {name} must be a JSON object")
    return [ParsedCall(_named(name), given)]


def _skip(text: str, at: int, chars: str = " \t\r\n,;") -> int:
    while at < len(text) and text[at] in chars:
        at += 1
    return at


def _read_json(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    """Read one or several JSON values, separated by white space, commas or semicolons."""
    calls: list[ParsedCall] = []
    at = end = opening.end()
    while not calls or text[at : at + 1] in ("{", "["):
        value, end = parse_value(text, at)
        calls += calls_in_json(value)
        at = _skip(text, end)
    return FoundCalls(calls, end)


def _read_named_json(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    """Read the arguments of a call whose name the opening contains."""
    at = _skip(text, opening.end())
    if text[at : at + 1] != "{":
        raise CallParseError(f"the arguments of {opening['name']} must be a JSON object")
    value, end = parse_value(text, at)
    return FoundCalls([ParsedCall(_named(opening["name"]), value)], end)


def _read_python(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    """Read calls in Python syntax, in a list, in lines, or inside `print(...)`."""
    at = _skip(text, opening.end())
    is_list = text[at : at + 1] == "["
    at = _skip(text, at + is_list)
    calls: list[ParsedCall] = []
    end = at
    while not calls or re.match(r"[A-Za-z_]", text[at : at + 1]):
        end = find_call_end(text, at)
        written = text[at:end]
        if written.startswith("print("):
            written = written[len("print(") : -1]
        calls.append(parse_call(written))
        at = _skip(text, end)
    if is_list:
        if text[at : at + 1] != "]":
            raise CallParseError("the list of calls is never closed")
        end = at + 1
    return FoundCalls(calls, end)


def _read_llama(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    is_json = text[opening.end() : opening.end() + 1] in ("{", "[")
    return (_read_json if is_json else _read_python)(text, opening, tools)


def _read_mistral(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    return (_read_named_json if opening["name"] else _read_json)(text, opening, tools)


def _read_deepseek(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    """Read `function<sep>name` with a fenced object (V3, R1), or `name<sep>{...}` (V3.1)."""
    at = text.find(_SEPARATOR, opening.end())
    if at < 0:
        raise CallParseError("the call has no separator between its name and its arguments")
    first, at = text[opening.end() : at].strip(), at + len(_SEPARATOR)
    header = re.compile(r"\s*(?P<name>[\w.\-]{1,100})\s*```(?:json)?\s*").match(text, at)
    if header:
        found = _read_named_json(text, header, tools)
        fence = re.compile(r"\s*```").match(text, found.end)
        return FoundCalls(found.calls, fence.end() if fence else found.end)
    value, end = parse_value(text, _skip(text, at))
    if not isinstance(value, dict):
        raise CallParseError(f"the arguments of {first} must be a JSON object")
    return FoundCalls([ParsedCall(_named(first), value)], end)


def _read_parameters(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    """Read `<parameter>` elements, or a JSON object instead of them."""
    name = tool_name(_named(opening["name"]), tools)
    closing = _END_OF_XML.search(text, opening.end())
    body = text[opening.end() : closing.start() if closing else len(text)]
    if body.lstrip().startswith("{"):
        return FoundCalls([ParsedCall(name, parse_json_arguments(body))], opening.end() + len(body))
    arguments = read_xml_arguments(body, tools.get(name))
    return FoundCalls([ParsedCall(name, arguments)], opening.end() + len(body))


def _read_glm(text: str, opening: re.Match[str], tools: Tools) -> FoundCalls:
    name = tool_name(_named(opening["name"]), tools)
    end = text.find("</tool_call>", opening.end())
    end = end if end >= 0 else len(text)
    body = text[opening.end() : end]
    return FoundCalls([ParsedCall(name, read_glm_arguments(body, tools.get(name)))], end)


def read_whole(text: str, tools: Tools) -> list[ParsedCall]:
    """Return the calls of a text that is nothing but calls.

    Raises:
        CallParseError: The text contains other text than calls.
    """
    if fence := _FENCED.fullmatch(text):
        text = fence[1].strip()
    start = _START.match(text)
    assert start is not None
    is_python = re.match(r"\[\s*[A-Za-z_]|[A-Za-z_]", text) is not None
    found = (_read_python if is_python else _read_json)(text, start, tools)
    if _skip(text, found.end, " \t\r\n.;`") < len(text):
        raise CallParseError("text follows the call")
    return found.calls


def _format(opening: str, read: _Reader, closing: str = r"(?!)") -> CallFormat:
    return CallFormat(re.compile(opening), read, re.compile(rf"\s*(?:{closing})"))


_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DSML = "(?:\uff5cDSML\uff5c)?"
_NAME = r"(?P<name>[\w.\-]{1,100})"
_START = re.compile("")
_FENCED = re.compile(r"```\w*[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
_END_OF_XML = re.compile(rf"</function>|</{_DSML}invoke>|</(?:\w+:)?tool_call>|</\w+:invoke>")

_TAGS = "tool_call|tool_calls|TOOLCALL|tool_use|function_call|function_calls"
_XML_CLOSING = (
    rf"(?:(?:</function>|</{_DSML}invoke>|</\w+:invoke>|</(?:\w+:)?tool_calls?>"
    rf"|</{_DSML}function_calls>)\s*)+"
)
_HERMES = _format(rf"<(?:{_TAGS})>\s*(?=[\[{{])|<\|tool_call\|>\s*(?=[\[{{])", _read_json,
                  rf"</(?:{_TAGS})>|<\|/tool_call\|>")  # fmt: skip
_FUNCTION = _format(
    rf"(?:<(?:\w+:)?tool_call>\s*)?<function={_NAME}>", _read_parameters, _XML_CLOSING
)
_GLM = _format(rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)", _read_glm, "</tool_call>")
_INVOKE = _format(
    rf"(?:<(?:\w+:)?{_DSML}(?:function_calls|tool_call)>\s*)?"
    rf"<(?:\w+:)?{_DSML}invoke\s+name=\"?{_NAME}\"?\s*>",
    _read_parameters,
    _XML_CLOSING,
)
_PYTHON_TAG = _format(r"<\|python_tag\|>\s*", _read_llama, r"<\|e(?:om|ot)_id\|>")
_MISTRAL = _format(
    rf"\[TOOL_CALLS\]\s*(?:{_NAME}\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{{))?",
    _read_mistral,
    "</s>",
)
_DEEPSEEK = _format(
    "(?:<\uff5ctool\u2581calls\u2581begin\uff5c>\\s*)?<\uff5ctool\u2581call\u2581begin\uff5c>",
    _read_deepseek,
    "(?:<\uff5ctool\u2581calls?\u2581end\uff5c>\\s*)+",
)
_KIMI = _format(
    r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?P<name>[\w.\-:]{1,120})\s*"
    r"<\|tool_call_argument_begin\|>",
    _read_named_json,
    r"(?:<\|tool_calls?(?:_section)?_end\|>\s*)+",
)
_HARMONY = _format(
    r"(?:<\|start\|>)?(?:assistant)?\s{0,4}(?:<\|channel\|>)?\s{0,4}(?:commentary|analysis)?\s{0,4}"
    r"to=functions\.(?P<name>[\w\-]{1,100})[^{\n]{0,120}(?=\{)",
    _read_named_json,
    r"<\|(?:call|end)\|>",
)
_FUNCTOOLS = _format(r"functools\s*(?=\[\s*\{)", _read_json)
_TOOL_CODE = _format(r"```tool_code[ \t]*\n", _read_python, "```")
_COMMAND = _format(r"<\|START_ACTION\|>\s*(?=[\[{])", _read_json, r"<\|END_ACTION\|>")
_INTERNLM = _format(
    r"<\|action_start\|>\s*<\|plugin\|>\s*(?=[\[{])", _read_json, r"<\|action_end\|>"
)
_MARKED_PYTHON = _format(
    r"<\|python_start\|>\s*(?=\[|[A-Za-z_])|<function_calls>\s*(?=\[?\s*[A-Za-z_][\w.]{0,100}\()",
    _read_python,
    r"<\|python_end\|>|</function_calls>",
)

#: Formats that a family's models write; `tool_format` names one of the families.
FAMILIES: dict[str, tuple[CallFormat, ...]] = {
    "hermes": (_HERMES,),
    "qwen3_coder": (_FUNCTION,),
    "glm": (_GLM,),
    "llama": (_PYTHON_TAG, _FUNCTION),
    "pythonic": (_MARKED_PYTHON,),
    "mistral": (_MISTRAL,),
    "deepseek": (_DEEPSEEK,),
    "invoke": (_INVOKE,),
    "kimi": (_KIMI,),
    "harmony": (_HARMONY,),
    "functools": (_FUNCTOOLS,),
    "tool_code": (_TOOL_CODE,),
    "command": (_COMMAND,),
    "internlm": (_INTERNLM,),
    "json": (),
}
#: Families whose calls may have no marks.
UNMARKED = frozenset({AUTO, "llama", "pythonic", "tool_code", "json"})

#: The values of the option `tool_format`.
TOOL_FORMATS = (AUTO, *FAMILIES)

ALL_MARKED = tuple(dict.fromkeys(form for forms in FAMILIES.values() for form in forms))
ANY_MARK = re.compile(
    rf"<(?:\w+:)?(?:{_TAGS})>|<function=|<(?:\w+:)?{_DSML}invoke\s|<\|python_(?:tag|start)\|>"
    r"|\[TOOL_CALLS\]|<\uff5ctool\u2581|<\|tool_call|to=functions\.|functools\s*\[\s*\{"
    r"|<\|channel\|>|<\|start\|>|commentary to=|```tool_code|<\|START_ACTION\|>|<\|action_start\|>"
)
