"""Own problems of HumanEval's form, each with mutants of its solution, for `python_tests`.

A mutant replaces one text of the canonical solution. A wrong mutant fails the problem's test; an
equivalent one returns the same values, and differs only in its ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Mutation = tuple[str, str]


@dataclass(frozen=True)
class Problem:
    """One row of the dataset: the prompt ends with the docstring, the solution is the body."""

    entry_point: str
    prompt: str
    solution: str
    test: str
    wrong: tuple[Mutation, ...]
    equivalent: tuple[Mutation, ...]

    @property
    def row(self) -> dict[str, Any]:
        return {
            "task_id": f"Own/{self.entry_point}",
            "prompt": self.prompt,
            "entry_point": self.entry_point,
            "canonical_solution": self.solution,
            "test": "\n\nMETADATA = {'dataset': 'test'}\n\n\n" + self.test,
        }

    def mutants(self, mutations: tuple[Mutation, ...]) -> list[str]:
        """Return the bodies with one mutation each; every mutation must change the solution."""
        for old, _ in mutations:
            assert self.solution.count(old) == 1, (self.entry_point, old)
        return [self.solution.replace(old, new) for old, new in mutations]


#: Tests use a helper of the prompt with random texts.
UNSHIFT = Problem(
    "unshift_triples",
    '''def shift_triples(text: str) -> str:
    """Move the first letter of each group of three to the end of its group."""
    groups = [text[start : start + 3] for start in range(0, len(text), 3)]
    return "".join(group[1:] + group[:1] if len(group) == 3 else group for group in groups)


def unshift_triples(text: str) -> str:
    """Return the text from which shift_triples made this one."""
''',
    "    return shift_triples(shift_triples(text))\n",
    """def check(candidate):
    from random import Random
    import string

    random = Random(7)
    for size in range(30):
        text = ''.join(random.choice(string.ascii_lowercase) for _ in range(size))
        assert candidate(shift_triples(text)) == text
""",
    wrong=(
        ("shift_triples(shift_triples(text))", "shift_triples(text)"),
        ("shift_triples(shift_triples(text))", "text"),
        ("shift_triples(shift_triples(text))", "shift_triples(shift_triples(text)) + ' '"),
    ),
    equivalent=(
        (
            "return shift_triples(shift_triples(text))",
            "for _ in range(5):\n        text = shift_triples(text)\n    return text",
        ),
        (
            "return shift_triples(shift_triples(text))",
            "groups = [text[at:at + 3] for at in range(0, len(text), 3)]\n"
            "    return ''.join(g[-1] + g[:-1] if len(g) == 3 else g for g in groups)",
        ),
    ),
)

#: The test computes with the answer, on copies of its arguments, within a tolerance.
ROOT = Problem(
    "falling_root",
    '''import math


def evaluate(factors: list, x: float):
    """Return the value of factors[0] + factors[1] * x + factors[2] * x ** 2 and so on."""
    return sum(factor * math.pow(x, power) for power, factor in enumerate(factors))


def falling_root(factors: list):
    """Return one x where the polynomial is zero; the number of factors is even.

    >>> round(falling_root([1, 2]), 2)
    -0.5
    """
''',
    """    low, high = -1.0, 1.0
    while evaluate(factors, low) * evaluate(factors, high) > 0:
        low, high = low * 2, high * 2
    while high - low > 1e-10:
        middle = (low + high) / 2
        if evaluate(factors, middle) * evaluate(factors, low) > 0:
            low = middle
        else:
            high = middle
    return low
""",
    """def check(candidate):
    import copy
    import math
    import random

    rng = random.Random(42)
    for _ in range(10):
        factors = [rng.randint(-10, 10) or 1 for _ in range(2 * rng.randint(1, 3))]
        solution = candidate(copy.deepcopy(factors))
        assert math.fabs(evaluate(factors, solution)) < 1e-4
""",
    wrong=(("low = middle", "high = low"), ("return low", "return high + 1")),
    equivalent=(
        ("return low", "return high"),
        ("low, high = -1.0, 1.0", "low, high = -3.0, 2.0"),
        ("-1.0, 1.0\n", "-1.0, 1.0\n    factors = tuple(factors)\n"),
    ),
)

BEGINS = Problem(
    "longest_beginning",
    '''from typing import List, Optional


def longest_beginning(words: List[str]) -> Optional[str]:
    """Return the longest text with which all words begin; None without words.

    >>> longest_beginning(['flow', 'flower'])
    'flow'
    >>> longest_beginning([])
    """
''',
    """    if not words:
        return None
    first, last = min(words), max(words)
    size = 0
    while size < len(first) and first[size] == last[size]:
        size += 1
    return first[:size]
""",
    """def check(candidate):
    assert candidate([]) is None
    assert candidate(['flow', 'flower']) == 'flow'
    assert candidate(['a', 'b']) == ''
    assert candidate(['x']) == 'x'
    assert candidate(['interview', 'internet', 'interval']) == 'inter'
""",
    wrong=(
        ("return None", "return ''"),
        ("size += 1", "size += 2"),
        ("first[:size]", "last[size:]"),
    ),
    equivalent=(
        ("size < len(first)", "size < min(len(first), len(last))"),
        ("if not words", "if len(words) < 1"),
        ("first[:size]", "last[:size]"),
    ),
)

PARITY = Problem(
    "count_by_parity",
    '''def count_by_parity(numbers):
    """Return a tuple with the number of even and of odd numbers that are not negative.

    Example:
        count_by_parity([1, 2, 4, -3]) ==> (2, 1)
    """
''',
    """    even = odd = 0
    for number in numbers:
        if number < 0:
            continue
        if number % 2 == 0:
            even += 1
        else:
            odd += 1
    return (even, odd)
""",
    """def check(candidate):

    # Check some simple cases
    assert candidate([3, 2, 4, -3]) == (2, 1), "Error"
    assert candidate([]) == (0, 0)

    # Check some edge cases that are easy to work out by hand.
    assert candidate([0, -0, -2]) == (2, 0)
    assert True, "This prints if this assert fails"
""",
    wrong=(
        ("number < 0", "number <= 0"),
        ("odd += 1", "odd += number"),
        ("(even, odd)", "(odd, even)"),
        ("return (even, odd)", "return [even, odd]"),
    ),
    equivalent=(
        ("return (even, odd)", "return tuple([even, odd])"),
        ("number % 2 == 0", "not number & 1"),
        ("        if number < 0:\n            continue\n", "        if number < 0: continue\n"),
    ),
)

DIGEST = Problem(
    "fingerprint",
    '''def fingerprint(text):
    """Return the MD5 of the text in hexadecimal digits; None for the empty text."""
''',
    """    import hashlib

    return hashlib.md5(text.encode("ascii")).hexdigest() if text else None
""",
    """def check(candidate):
    assert candidate('abc') == '900150983cd24fb0d6963f7d28e17f72'
    assert candidate('') == None
""",
    wrong=(("md5", "sha1"), (" if text else None", ""), ("hexdigest()", "digest()")),
    equivalent=(('"ascii"', '"utf-8"'), ("if text else None", "if text != '' else None")),
)

RANKS = Problem(
    "rank_words",
    '''def rank_words(text):
    """Return a dict from each word to its rank by frequency; equal frequencies share a rank."""
''',
    """    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    order = sorted(set(counts.values()), reverse=True)
    return {word: order.index(count) + 1 for word, count in counts.items()}
""",
    """def check(candidate):
    assert candidate('a a b b c') == {'a': 1, 'b': 1, 'c': 2}
    assert candidate('') == {}
    got = candidate('x y')
    assert sorted(got) == ['x', 'y'] and got['x'] == 1
""",
    wrong=(
        ("reverse=True", "reverse=False"),
        ("+ 1 for", "for"),
        ("set(counts.values())", "counts.values()"),
        ("order.index(count)", "order.find(count)"),
    ),
    equivalent=(
        ("counts.get(word, 0) + 1", "1 + counts.get(word, 0)"),
        ("counts = {}", "from collections import Counter\n    counts = Counter()"),
    ),
)

PROBLEMS = (UNSHIFT, ROOT, BEGINS, PARITY, DIGEST, RANKS)
