"""Correct candidates for `f` of the prompt `TREE`, each with the body of its test."""

from __future__ import annotations

TREE = """
from dataclasses import dataclass

class Node:
    def __init__(self, value, left=None, right=None):
        self.value, self.left, self.right = value, left, right

@dataclass
class Point:
    x: int
    y: int

def helper(x):
    return x * 2

def f(x):
    \"\"\"Do it.\"\"\"
"""

HONEST = [
    (
        "def f(x): x.sort(); x.append(9)",
        """
a = [2, 1]
candidate(a)
assert a == [1, 2, 9]
""",
    ),
    (
        "def f(x): x['k'] = (1, {2})",
        """
a = {}
candidate(a)
assert a == {'k': (1, {2})}
""",
    ),
    (
        "def f(x): raise KeyError('no')",
        """
try:
    candidate(1)
    assert 0
except KeyError as e:
    assert e.args == ('no',)
""",
    ),
    (
        """
class Odd(ValueError): pass
def f(x): raise Odd(1)
""",
        """
try:
    candidate(1)
    assert 0
except ValueError: pass
""",
    ),
    (
        """
def f(x):
    def g(y): return x + y
    return g
""",
        "assert candidate(3)(4) == 7",
    ),
    (
        "def f(x): yield from range(x)",
        "assert list(candidate(4)) == [0, 1, 2, 3]",
    ),
    (
        "def f(x): return map(str, x)",
        "assert list(candidate([1, 2])) == ['1', '2']",
    ),
    (
        "def f(x): return sorted(x, key=lambda v: -v)",
        "assert candidate({1, 3, 2}) == [3, 2, 1]",
    ),
    (
        "def f(x, *, by=1): return x + by",
        "assert candidate(1, by=5) == 6",
    ),
    (
        "def f(x): return x(2) + x(3)",
        "assert candidate(lambda v: v * 10) == 50",
    ),
    (
        "def f(x): return sum(x)",
        "assert candidate(v for v in [1, 2, 3]) == 6",
    ),
    (
        "def f(x): return 2 ** x",
        "assert candidate(100000) == 2 ** 100000",
    ),
    (
        "def f(x): return float('nan'), -0.0, 1e400",
        """
import math
a, b, c = candidate(0)
assert math.isnan(a) and math.copysign(1, b) == -1 and c == math.inf
""",
    ),
    (
        """
def f(x): return [x, (x,), {x: None}, b'\\xff', range(3), frozenset({1}), '\\ud800']
""",
        """
got = candidate(True)
assert got == [True, (True,), {True: None}, b'\\xff', range(3), frozenset({1}), '\\ud800']
""",
    ),
    (
        """
from decimal import Decimal
def f(x): return Decimal('0.1') + x
""",
        """
from decimal import Decimal
assert candidate(Decimal('0.2')) == Decimal('0.3')
""",
    ),
    (
        """
from collections import Counter, OrderedDict, deque
def f(x): return Counter(x), OrderedDict(a=1), deque([1])
""",
        """
from collections import Counter, OrderedDict, deque
assert candidate('aab') == (Counter('aab'), OrderedDict(a=1), deque([1]))
""",
    ),
    (
        """
import datetime
def f(x): return x + datetime.timedelta(days=1)
""",
        """
import datetime
assert candidate(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)
""",
    ),
    (
        "def f(x): print('hello', x)",
        """
import contextlib, io
out = io.StringIO()
with contextlib.redirect_stdout(out):
    candidate(1)
assert out.getvalue() == 'hello 1\\n'
""",
    ),
    (
        "def f(x): return x.left.value + helper(x.value)",
        "assert candidate(Node(5, Node(2))) == 12",
    ),
    (
        "def f(x): return Node(x, Node(1))",
        """
n = candidate(4)
assert n.value == 4 and n.left.value == 1 and n.right is None
""",
    ),
    (
        "def f(x): return Point(x.y, x.x)",
        "assert candidate(Point(1, 2)) == Point(2, 1)",
    ),
    (
        "def f(x): x.value = 7",
        """
n = Node(1)
candidate(n)
assert n.value == 7
""",
    ),
    (
        "def f(x): return int, list",
        "assert candidate(0) == (int, list)",
    ),
    (
        """
import sys
sys.setrecursionlimit(10**6)
def f(x): return 0 if x == 0 else 1 + f(x - 1)
""",
        "assert candidate(3000) == 3000",
    ),
]
