"""The demo's arithmetic prompts: small, with exact answers, and equal for equal seeds.

`rollout demo` and the tests call `demo_prompts`. Must not: enqueue them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_Form = Callable[[random.Random], tuple[str, int]]


def demo_prompts(n: int = 64, seed: int = 0) -> list[dict[str, str]]:
    """Return `n` different questions with their answers, in the fields `question`, `answer`.

    `{"question": "What is 12 * (3 + 4)?", "answer": "84"}`
    """
    draw = random.Random(seed)
    prompts: dict[str, str] = {}
    while len(prompts) < n:
        expression, result = draw.choice(_FORMS)(draw)
        prompts[f"What is {expression}?"] = str(result)
    return [{"question": question, "answer": answer} for question, answer in prompts.items()]


def _product_of_sum(draw: random.Random) -> tuple[str, int]:
    a, b, c = (draw.randint(2, 40) for _ in range(3))
    return f"{a} * ({b} + {c})", a * (b + c)


def _product_less(draw: random.Random) -> tuple[str, int]:
    a, b, c = draw.randint(11, 99), draw.randint(11, 99), draw.randint(2, 500)
    return f"{a} * {b} - {c}", a * b - c


def _exact_quotient(draw: random.Random) -> tuple[str, int]:
    divisor, result, more = draw.randint(3, 25), draw.randint(4, 90), draw.randint(2, 99)
    return f"{divisor * result} / {divisor} + {more}", result + more


def _sum_of_products(draw: random.Random) -> tuple[str, int]:
    a, b, c, d = (draw.randint(3, 60) for _ in range(4))
    return f"{a} * {b} + {c} * {d}", a * b + c * d


_FORMS: tuple[_Form, ...] = (_product_of_sum, _product_less, _exact_quotient, _sum_of_products)
