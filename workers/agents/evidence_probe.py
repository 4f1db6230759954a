"""Records the outcome of each test, inside the tests' own process.

`evidence.py` copies this file into the sandbox under a random name. pytest loads it as a plug-in;
`python -m NAME` runs it in place of `-m unittest`. Interpreters from 3.7 on can load it. Must not:
import anything of this project, or do anything where no record is asked for.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import sys
import traceback
import types
import unittest
from typing import Any


def _take_record_address() -> str:
    """Return the record's path and key, and remove them from the environment.

    Programs that the tests start must not add to the record.
    """
    return os.environ.pop("ROLLOUT_EVIDENCE", "")


class _Record:
    """The outcome of each test; a failure of one phase outweighs the success of others.

    Tests `passed`, `failed` or were `skipped`; a module that could not be imported is an `error`.
    """

    def __init__(self, address: str) -> None:
        path, _, key = address.rpartition(":")
        self.outcomes: dict[str, str] = {}
        self.skipped_in: dict[str, list[str]] = {}

        def write(**fields: Any) -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **fields}) + "\n")

        self._write = write
        version = ".".join(map(str, sys.version_info[:3]))
        write(event="started", python=f"{version} {sys.executable}")

    def add(self, test: str, outcome: str, files: list[str] | None = None) -> None:
        if self.outcomes.get(test) not in ("failed", "error"):
            self.outcomes[test] = outcome
        if files:
            self.skipped_in[test] = files

    def finish(self, is_sound: bool) -> None:
        self._write(
            event="finished",
            outcomes=self.outcomes,
            skipped_in=self.skipped_in,
            is_sound=is_sound,
        )


def _files_of(trace: Any) -> list[str]:
    """Return the files through which an exception passed."""
    return sorted({frame.filename for frame in traceback.extract_tb(trace)})


class _MustFail(unittest.TestCase):
    """A test that fails wherever assertions work."""

    def runTest(self) -> None:
        self.assertEqual(1, 2)  # noqa: PT009 - this method is examined


def _unittest_is_sound() -> bool:
    result = unittest.TestResult()
    _MustFail().run(result)
    return len(result.failures) == 1 and not result.wasSuccessful()


# --- objects that equal everything ---

_CHECKED = "__rollout_checked__"
#: Files of tests, as in `protected_paths`, below the folder in which the tests were started.
_OF_TESTS = re.compile(r"(^|/)(tests?/|test_[^/]*\.py$|[^/]*_test\.py$|conftest\.py$)")
_FOLDER = os.getcwd()
_MOCKS = ("unittest.mock", "mock", "dirty_equals")
_EQUALITIES = (
    "assertEqual", "assertListEqual", "assertTupleEqual", "assertSequenceEqual", "assertDictEqual",
    "assertSetEqual", "assertMultiLineEqual", "assertCountEqual", "assertAlmostEqual", "assertIn",
)  # fmt: skip


def _checked(value: Any, allows_mocks: bool = False) -> Any:
    """Return the operand of a comparison.

    Raises:
        AssertionError: It equals every value of a type, so the comparison would prove nothing.
    """
    if _equals_everything(value, allows_mocks, 4):
        raise AssertionError("the test compares an object that equals everything")
    return value


def _equals_everything(value: Any, allows_mocks: bool, depth: int) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict) and depth:
        parts = value.values() if kind is dict else value
        return any(_equals_everything(part, allows_mocks, depth - 1) for part in list(parts)[:100])
    # A comparison that is written in C, such as an array's, may be expensive, and the model did not
    # write it. The check of the name excludes another method of C, such as `__ne__`, as `__eq__`.
    is_of_c = isinstance(kind.__eq__, types.WrapperDescriptorType)
    if is_of_c and kind.__eq__.__name__ == "__eq__":
        return False
    if (allows_mocks and kind.__module__ in _MOCKS) or _is_of_tests(kind):
        return False
    return any(_equals(value, other) for other in _random_values())


def _is_of_tests(kind: Any) -> bool:
    """Say whether the comparison is defined in a test file, for objects that match a pattern.

    Changes of test files do not count, so the model did not write the comparison.
    """
    code = getattr(kind.__eq__, "__code__", None)
    return code is not None and bool(_OF_TESTS.search(os.path.relpath(code.co_filename, _FOLDER)))


def _equals(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:
        return False


def _random_values() -> list[Any]:
    """Return random values, one of each common type; only an object that equals all equals one."""
    number = int.from_bytes(os.urandom(8), "big")
    text = str(number)
    return [
        *(object(), number, number / 7, text, text.encode()),
        *([number], (number,), {text: number}, {number}),
    ]


class _OperandChecks(ast.NodeTransformer):
    """Wraps the operands of `==` and `in` of a module's `assert` statements in `_checked`."""

    def __init__(self, module: ast.Module) -> None:
        self._allows_mocks = any(
            (isinstance(node, ast.ImportFrom) and node.module in (*_MOCKS, "unittest"))
            or (isinstance(node, ast.Import) and any(n.name in _MOCKS for n in node.names))
            for node in ast.walk(module)
        )
        self._depth = 0

    def visit_Assert(self, node: ast.Assert) -> Any:
        self._depth += 1
        node.test = self.visit(node.test)
        self._depth -= 1
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if self._depth and any(isinstance(operator, (ast.Eq, ast.In)) for operator in node.ops):
            node.left = self._call(node.left)
            node.comparators = [self._call(each) for each in node.comparators]
        return node

    def _call(self, operand: ast.expr) -> ast.expr:
        if isinstance(operand, ast.Constant):
            return operand
        # pytest follows the names that an assignment inside of an assertion binds.
        if any(type(node).__name__ == "NamedExpr" for node in ast.walk(operand)):
            return operand
        name = ast.Name(_CHECKED, ast.Load())
        flag = ast.Constant(self._allows_mocks)
        flag.kind = None
        return ast.copy_location(ast.Call(name, [operand, flag], []), operand)


def _check_operands_of_pytest() -> None:
    from _pytest.assertion import rewrite

    original = rewrite.rewrite_asserts

    def rewrite_asserts(mod: Any, *args: Any, **kwargs: Any) -> None:
        _OperandChecks(mod).visit(mod)
        original(ast.fix_missing_locations(mod), *args, **kwargs)

    setattr(builtins, _CHECKED, _checked)
    rewrite.rewrite_asserts = rewrite_asserts


def _check_operands_of_unittest() -> None:
    for name in _EQUALITIES:
        setattr(unittest.TestCase, name, _with_checks(getattr(unittest.TestCase, name)))


def _with_checks(method: Any) -> Any:
    def compare(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = vars(sys.modules.get(type(self).__module__, types))
        kinds = [getattr(type(value), "__module__", "") for value in module.values()]
        names = [getattr(value, "__name__", "") for value in module.values()]
        allows_mocks = any(each in _MOCKS for each in [*kinds, *names])
        # The names of the operands differ between the methods, and tests may pass them by name.
        for operand in [*args[:2], *kwargs.values()]:
            _checked(operand, allows_mocks)
        return method(self, *args, **kwargs)

    return compare


# --- pytest ---


class _PytestRecorder:
    """A plug-in that follows one session; with pytest-xdist only in the main process."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._record.add(report.nodeid, "error")
        elif report.skipped:
            self._record.add(report.nodeid, "skipped", getattr(report, "passed_files", None))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._record.add(report.nodeid, "failed")
        elif report.skipped:
            self._record.add(report.nodeid, "skipped", getattr(report, "passed_files", None))
        elif report.when == "call":
            self._record.add(report.nodeid, "passed")

    def pytest_sessionfinish(self, session: Any) -> None:
        self._record.finish(_pytest_is_sound(session) and _unittest_is_sound())


def _pytest_is_sound(session: Any) -> bool:
    """Run a failing test by the session's own functions; say whether the test did not pass."""
    try:
        from _pytest.runner import runtestprotocol

        reports = runtestprotocol(_failing_item(session), log=False)
    except Exception:
        return True  # An older pytest has other functions; its tests' own results count.
    return not any(report.when == "call" and report.passed for report in reports)


def _failing_item(session: Any) -> Any:
    import pytest

    def must_fail() -> None:
        assert [1] == [2]

    class MustFail(pytest.Item):
        def runtest(self) -> None:
            must_fail()

    functions = [item for item in session.items if type(item) is pytest.Function]
    modules = [item.parent for item in functions if isinstance(item.parent, pytest.Module)]
    if not modules:
        return MustFail.from_parent(session, name="must_fail")
    item = pytest.Function.from_parent(modules[-1], name="must_fail", callobj=must_fail)
    item.fixturenames[:] = []  # The fixtures that every test uses may be expensive.
    return item


def pytest_configure(config: Any) -> None:
    """Begin the record of a session."""
    # The workers of pytest-xdist do not write a record; the main process gets their reports.
    if _ADDRESS and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_PytestRecorder(_Record(_ADDRESS)))


_IS_PLUGIN = "pytest" in sys.modules and __name__.startswith("rollout_")
_ADDRESS = _take_record_address() if _IS_PLUGIN else ""

if _IS_PLUGIN:
    import pytest

    _check_operands_of_pytest()
    _check_operands_of_unittest()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(item: Any, call: Any) -> Any:
        """Note the files through which a test's exception passed."""
        # Before the report is made, because pytest replaces SkipTest by an exception of its own.
        files = _files_of(call.excinfo.tb) if call.excinfo else []
        made = yield
        made.get_result().passed_files = files

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(collector: Any) -> Any:
        """Note the files through which a module's exception passed."""
        made = yield
        report = made.get_result()
        call = getattr(report, "call", None)
        report.passed_files = _files_of(call.excinfo.tb) if call and call.excinfo else []


# --- unittest ---


class _Result(unittest.TextTestResult):
    """Results that are recorded, too; `record` is set by the runner."""

    record: _Record

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.record.add(test.id(), "passed")

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        is_unread = type(test).__name__ == "_FailedTest"  # a module that could not be imported
        self.record.add(test.id(), "error" if is_unread else "failed")

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.record.add(test.id(), "failed")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.record.add(test.id(), "failed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.record.add(test.id(), "skipped", _files_of(sys.exc_info()[2]))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self.record.add(test.id(), "skipped", _files_of(err[2]))

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self.record.add(test.id(), "failed")


class _Loader(unittest.TestLoader):
    """A loader that records where a module was skipped as a whole."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self._record = record

    def _get_module_from_name(self, name: str) -> Any:
        try:
            return super()._get_module_from_name(name)  # type: ignore[misc]
        except unittest.SkipTest:
            self._record.add(name, "skipped", _files_of(sys.exc_info()[2]))
            raise


def _run_unittest() -> None:
    record = _Record(_take_record_address())
    _check_operands_of_unittest()

    class Result(_Result):
        pass

    Result.record = record

    class Runner(unittest.TextTestRunner):
        resultclass: Any = Result

        def run(self, test: Any) -> Any:
            result = super().run(test)
            record.finish(_unittest_is_sound())
            return result

    sys.argv[0] = "python -m unittest"
    unittest.main(module=None, testRunner=Runner, testLoader=_Loader(record))


if __name__ == "__main__":
    _run_unittest()
