import contextlib
import json
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workers.core.call_parser import (
    MAX_CALL_CHARS,
    CallParseError,
    ParsedCall,
    find_call_end,
    parse_call,
    parse_json_arguments,
)


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("f()", {}),
        ("f(a=1, b='x, y')", {"a": 1, "b": "x, y"}),
        ("f(a='(not) closed', b=\"say 'hi'\")", {"a": "(not) closed", "b": "say 'hi'"}),
        (
            "f(a=[1, 2.5, -3], b={'k': None, 'n': [True]})",
            {"a": [1, 2.5, -3], "b": {"k": None, "n": [True]}},
        ),
        ("f(a=true, b=null, c=false)", {"a": True, "b": None, "c": False}),
        ('f({"a": "1, 2", "b": [true, null]})', {"a": "1, 2", "b": [True, None]}),
        ("f({'a': 1})", {"a": 1}),
        ("f(a='line one\nline two')", {"a": "line one\nline two"}),
        ('f(a="""x\n"quoted"\n""")', {"a": 'x\n"quoted"\n'}),
        ("f(a='one' 'two')", {"a": "onetwo"}),
        ("f(a=(1, 2))", {"a": [1, 2]}),
        ("  f (a=1) .", {"a": 1}),
        (r"f(pattern='\d+')", {"pattern": r"\d+"}),
        ("f(path='C:\\\\x')", {"path": "C:\\x"}),
        ("f(s='ünï 漢')", {"s": "ünï 漢"}),
    ],
)
def test_arguments_are_read(text, args):
    assert parse_call(text) == ParsedCall("f", args)


def test_values_without_a_name_take_the_parameters_in_order():
    assert parse_call("f(1, 'x', c=2)").bind(["a", "b", "c"]).args == {"a": 1, "b": "x", "c": 2}
    assert parse_call("web.search-it('q')").bind(["query"]) == ParsedCall(
        "web.search-it", {"query": "q"}
    )
    assert parse_call("f(1)").positional == (1,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with the tool's name"),
        ("calculator", "expected '('"),
        ("f(a=1", "never closed"),
        ("f(a='x)", "not closed by '"),
        ("f(a=1]", "do not match"),
        ("f(a=1) and more", "unexpected text after the call"),
        ("f(a=b)", "plain values"),
        ("f(a=__import__('os'))", "not call"),
        ("f(a=1+1)", "not binop"),
        ("f(a=f'{x}')", "not joinedstr"),
        ("f(a=b'x')", "plain values"),
        ("f(a=1j)", "plain values"),
        ("f(a=x.y)", "not attribute"),
        ("f(**{'a': 1})", "'**' is not allowed"),
        ("f(*[1])", "not starred"),
        ("f(a=1, a=2)", "given a twice"),
        ("f({1: 2})", "names of arguments must be text"),
        ("f(a={[1]: 2})", "keys of a dict"),
        ("f(a=1e999)", "too large"),
        ("f(a=0x" + "f" * 9000 + ")", "too long"),
        ("f(a=" + "9" * 5000 + ")", "cannot read"),
        ("f(" + "[" * 60 + "]" * 60 + ")", "nested deeper"),
        ("f('" + "x" * MAX_CALL_CHARS + "')", "longer than"),
        ("f(a='\ud800')", "cannot read"),
        ("f(a='\x00')", "cannot read"),
    ],
)
def test_each_unreadable_call_says_why(text, words):
    with pytest.raises(CallParseError) as error:
        parse_call(text)
    assert words in str(error.value)


def test_too_many_values_and_a_name_given_twice_are_refused():
    with pytest.raises(CallParseError, match="2 values without a name; name them"):
        parse_call("f(1, 2)").bind(["a"])
    with pytest.raises(CallParseError, match="was given a twice"):
        parse_call("f(1, a=2)").bind(["a"])


@pytest.mark.parametrize(
    "body",
    [
        "-" * 90_000 + "1",
        "not " * 20_000 + "1",
        "1" + "+1" * 40_000,
        "a" + ".b" * 40_000,
        "lambda: " * 10_000 + "1",
        "1 if 1 else " * 5_000 + "1",
        "a=" + "'x' " * 20_000,
    ],
)
def test_deep_syntax_is_an_error_of_the_parser_or_read(body):
    with contextlib.suppress(CallParseError):
        parse_call(f"f({body})").bind(["a"])


def test_where_a_call_ends_is_found_inside_other_text():
    text = "calc(e='(1')) rest"
    assert text[: find_call_end(text)] == "calc(e='(1')"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object, not a list"),
        ("NaN", "NaN is not a JSON value"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "[" * 99 + "]" * 99 + "}", "nested deeper"),
        ("[" * 50_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_unreadable_json_says_why(text, words):
    with pytest.raises(CallParseError, match=words.replace("(", r"\(")):
        parse_json_arguments(text)


def test_json_arguments_may_be_empty_and_hold_real_newlines():
    assert parse_json_arguments(" ") == {}
    assert parse_json_arguments('{"a": "x\ny"}') == {"a": "x\ny"}


texts = st.text(max_size=30) | st.text(alphabet="fab(){}[]'\"\\,=:*.1-_ \n", max_size=60)


@given(texts)
@example("f(__import__('sys').exit())")
@settings(max_examples=400, deadline=None)
def test_any_text_is_read_or_refused_with_the_parsers_own_error(text):
    for read in (parse_call, parse_json_arguments, lambda t: parse_call(f"f({t})").bind(["a"])):
        with contextlib.suppress(CallParseError):
            read(text)


names = st.text(string.ascii_letters, min_size=1, max_size=6).filter(
    lambda name: name not in {"if", "in", "is", "as", "or", "not", "and", "for", "def", "del"}
)
safe_text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | safe_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(safe_text, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(names, values, max_size=3))
@settings(max_examples=200, deadline=None)
def test_what_python_or_json_writes_is_read_back(args):
    written = ", ".join(f"{name}={value!r}" for name, value in args.items())
    try:
        compile(f"f({written})", "", "eval")
    except SyntaxError:
        return  # a drawn name is a Python keyword
    assert parse_call(f"f({written})").args == args
    assert parse_call(f"f({json.dumps(args)})").args == args


EXECUTED = []


@given(st.sampled_from(["f(a={})", "f({})", "f(**{})", "f(a=[{}])", "f({{{}: 1}})"]))
@settings(deadline=None)
def test_nothing_is_ever_executed(shape):
    code = "__import__('tests.unit.library.test_call_parser').EXECUTED.append(1)"
    with pytest.raises(CallParseError):
        parse_call(shape.format(code))
    assert EXECUTED == []
