"""The values that a reward function may return, and their common form `RewardResult`.

`registry.score` reads every returned value here. Must not call a reward function, or guess: a value
that is not a finite number is an error, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from pipeline.contract.errors import ContractError, RewardError
from pipeline.contract.messages import storable
from pipeline.contract.names import check_name


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A trajectory's reward and its named parts; all numbers are finite."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


def read_result(value: Any, name: str) -> RewardResult:
    """Read a number, a bool, a `RewardResult`, a dict with "reward", or a list of turn rewards.

    The rewards of turns are summed, and kept as parts `turn_0`, `turn_1`, …

    Raises:
        ContractError: The value is none of these; code `reward_type`. Or a part's name is too long
            or occurs twice; code `reward_part_name`.
        RewardError: A number is NaN or infinite; code `not_finite`.
    """
    if isinstance(value, RewardResult):
        return RewardResult(_number(value.value, name), _parts(value.parts, name))
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise _wrong_type(name, "a dict without the key 'reward'")
        parts = {key: part for key, part in value.items() if key != "reward"}
        return RewardResult(_number(value["reward"], name), _parts(parts, name))
    if isinstance(value, list | tuple):
        return _of_turns(value, name)
    return RewardResult(_number(value, name))


def _of_turns(values: list[Any] | tuple[Any, ...], name: str) -> RewardResult:
    turns = [_number(value, name) for value in values]
    if not turns:
        raise _wrong_type(name, "an empty list")
    if len(turns) == 1:
        return RewardResult(turns[0])
    return RewardResult(sum(turns), {f"turn_{n}": turn for n, turn in enumerate(turns)})


def _parts(parts: Any, name: str) -> dict[str, float]:
    if not isinstance(parts, Mapping):
        raise _wrong_type(name, f"parts that are a {type(parts).__name__}")
    read: dict[str, float] = {}
    for key, part in parts.items():
        part_name = _part_name(str(key), name)
        if part_name in read:
            raise ContractError(
                f"Reward {name!r} returned two parts that are stored as {part_name!r}; give each "
                "part a name of its own.",
                code="reward_part_name",
            )
        read[part_name] = _number(part, f"{name}.{part_name}")
    return read


def _part_name(part: str, reward: str) -> str:
    try:
        return check_name(storable(part), f"part of reward {reward!r}")
    except ValueError as error:
        raise ContractError(
            f"{error} Name parts by what they measure, not by their content.",
            code="reward_part_name",
        ) from error


def _number(value: Any, name: str) -> float:
    # A number of numpy or torch. An array with one value also has `item`, but is not a number.
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, Real):
        raise _wrong_type(name, repr(value)[:80] if value is None else type(value).__name__)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"Reward {name!r} returned {number}, no finite number.", code="not_finite"
        )
    return number


def _wrong_type(name: str, description: str) -> ContractError:
    return ContractError(
        f"Reward {name!r} returned {description}; expected a finite number, a bool, a RewardResult "
        "or a dict with the key 'reward'.",
        code="reward_type",
    )
