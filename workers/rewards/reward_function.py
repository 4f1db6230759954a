"""A registered reward function: its inputs, its options, and the context of its call.

The registry makes it at registration, so scoring need not inspect signatures. Must not score.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeline.contract.errors import ContractError
from workers.core.options import OptionError, Options, check_options, options_of, takes_any
from workers.core.sync_call import is_async_callable

#: Names of the values that a reward function may take.
INPUTS = ("response", "answer", "prompt", "trajectory")
#: Other names of the same values, used by reward functions of the AgentCore toolkit.
ALIASES = {"response_text": "response", "ground_truth": "answer"}


class RunsIn(StrEnum):
    """The context in which a reward function is called."""

    LOOP = "loop"  #: async, or so cheap that a thread would cost more
    THREAD = "thread"
    PROCESS = "process"  #: CPU-bound; killed at the time limit


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One registered reward function."""

    name: str
    function: Callable[..., Any]
    version: str
    runs_in: RunsIn
    inputs: frozenset[str]  #: its parameters among INPUTS and ALIASES
    options: Options | None  #: further parameters, set by the run's reward config; None: any name
    bounds_itself: bool  #: has its own time limit, which excludes waits for a slot

    def check_config(self, config: Mapping[str, Any] | None) -> None:
        """Check the options that a run sets.

        Raises:
            ContractError: The function has no such option, or does not accept the value.
        """
        try:
            check_options(f"Reward {self.name!r}", config or {}, self.options)
        except OptionError as error:
            raise ContractError(str(error), code="reward_option") from None

    def arguments(
        self, values: Mapping[str, Any], config: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the arguments of a call.

        Raises:
            ContractError: As `check_config`.
        """
        self.check_config(config)
        chosen = {name: values[ALIASES.get(name, name)] for name in self.inputs}
        return {**chosen, **(config or {})}


def inspect_reward(
    name: str, function: Any, *, version: str, inline: bool, process: bool, bounds_itself: bool
) -> RewardFunction:
    """Read a function's signature; a class is instantiated and its object called.

    Raises:
        TypeError: The object is not callable, takes an unknown value, or is both `inline` and
            `process`.
    """
    if inspect.isclass(function):
        function = function()
    if not callable(function):
        raise TypeError(f"Reward {name!r} is a {type(function).__name__}, which cannot be called.")
    if inline and process:
        raise TypeError(f"Reward {name!r} cannot be both inline and in a process.")
    parameters = inspect.signature(function).parameters.values()
    is_open = takes_any(function)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = {*INPUTS, *ALIASES}
    types = options_of(function)
    unknown = [p.name for p in named if p.name not in known and p.default is p.empty]
    unknown += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if unknown:
        raise TypeError(
            f"Reward {name!r} takes {unknown[0]!r}, which is not known. It may take "
            f"{', '.join(INPUTS)} by name, and options that have a default."
        )
    runs_in = RunsIn.LOOP if inline or is_async_callable(function) else RunsIn.THREAD
    return RewardFunction(
        name=name,
        function=function,
        version=version,
        runs_in=RunsIn.PROCESS if process else runs_in,
        inputs=frozenset(known if is_open else {p.name for p in named} & known),
        options=None if is_open else {n: t for n, t in types.items() if n not in known},
        bounds_itself=bounds_itself,
    )
