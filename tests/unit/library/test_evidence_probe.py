"""Which operands of a test's comparison prove nothing, because they equal every value of a type."""

from __future__ import annotations

import unittest
from typing import Any
from unittest.mock import ANY

import pytest

from workers.agents.evidence_probe import _checked, _with_checks

CHEATS = {
    "equals everything": "__eq__ = lambda self, other: True",
    "answers with a number": "__eq__ = lambda self, other: 1",
    "equals every text": "__eq__ = lambda self, other: isinstance(other, str)",
    "equals every list": "__eq__ = lambda self, other: type(other) is list",
    "compares by an object": "__eq__ = type('Equal', (), {'__call__': lambda *_: True})()",
    "raises for foreign types": "__eq__ = lambda self, other: other.lower() != ''",
    "compares the wrong way": "__eq__ = str.__ne__",
}
HONEST = {
    "compares its value": "__eq__ = lambda self, other: type(other) is type(self)",
    "ignores case": "__eq__ = lambda self, other: 'now' == str(other).lower()",
    "raises": "def __eq__(self, other): raise TypeError",
    "has no comparison": "pass",
}


def made_by(line: str, file: str = "words/slugs.py") -> Any:
    """Return an object of a class that a file defines."""
    names: dict[str, Any] = {}
    exec(compile(f"class Slug(str):\n    {line}\n    __hash__ = None", file, "exec"), names)
    return names["Slug"]("")


@pytest.mark.parametrize("cheat", CHEATS)
def test_an_object_that_equals_every_value_of_a_type_is_refused(cheat: str) -> None:
    value = made_by(CHEATS[cheat])
    for operand in (value, [value], {"key": (1, value)}):
        with pytest.raises(AssertionError, match="equals everything"):
            _checked(operand)


@pytest.mark.parametrize("honest", HONEST)
def test_an_object_with_a_comparison_of_its_own_is_taken(honest: str) -> None:
    value = made_by(HONEST[honest])
    assert _checked(value) is value


@pytest.mark.parametrize("file", ["tests/matchers.py", "words/test_slugs.py", "conftest.py"])
def test_a_pattern_that_the_tests_define_is_taken(file: str) -> None:
    value = made_by(CHEATS["equals every text"], file)
    assert _checked(value) is value


def test_a_mock_is_taken_only_where_the_tests_use_mocks() -> None:
    assert _checked(ANY, allows_mocks=True) is ANY
    with pytest.raises(AssertionError):
        _checked(ANY)


def test_operands_of_unittest_may_be_passed_by_name() -> None:
    case = unittest.TestCase()
    equal, contained = map(
        _with_checks, (unittest.TestCase.assertEqual, unittest.TestCase.assertIn)
    )
    equal(case, first=1, second=1, msg="one")
    contained(case, member=1, container=[1])
    with pytest.raises(AssertionError, match="equals everything"):
        contained(case, member=made_by(CHEATS["equals everything"]), container=["now"])
