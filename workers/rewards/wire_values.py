"""Values that travel between the two processes of a test run, as JSON.

This module is part of the program in `test_runner.py`. Plain data is sent by content and rebuilt
from built-in types. Any other object stays in its process, and a handle is sent. Must not rebuild
an object whose code the sender could choose, or import another module of this project.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
from typing import Any

_SCALARS: frozenset[type] = frozenset((bool, int, float, str, type(None)))
_CONTAINERS: dict[str, Any] = {
    "l": list,
    "t": tuple,
    "s": set,
    "f": frozenset,
    "q": collections.deque,
}
_MAPPINGS: dict[str, Any] = {"d": dict, "o": collections.OrderedDict, "n": collections.Counter}
_TEXTUAL: dict[str, tuple[Any, Any, Any]] = {
    "D": (decimal.Decimal, str, decimal.Decimal),
    "F": (fractions.Fraction, str, fractions.Fraction),
    "c": (complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    "b": (bytes, lambda v: v.hex(), bytes.fromhex),
    "a": (bytearray, lambda v: v.hex(), bytearray.fromhex),
    "r": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "w": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "y": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "h": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "z": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: datetime.timedelta(*v),
    ),
}
#: The only classes that are sent themselves; calling one of them runs no code of the candidate.
_TYPES = (bool, int, float, str, list, tuple, dict, set, frozenset, bytes, bytearray, complex)
_BY_TYPE: dict[type, str] = {
    **{kind: tag for tag, kind in _CONTAINERS.items()},
    **{kind: tag for tag, kind in _MAPPINGS.items()},
    **{kind: tag for tag, (kind, _, _) in _TEXTUAL.items()},
}


#: An instance of a subclass of these is sent as an instance of the plain type.
_BASES: tuple[Any, ...] = (int, float, str, tuple, list, dict)


class CandidateError(Exception):
    """The candidate raised an exception of a class that is not built in."""


class Remote:
    """A proxy of an object in the other process; supports calls, iteration and attributes.

    `values` is the `Peer` that sends the requests. Two proxies are equal only if they are
    identical, because a comparison sends no request.
    """

    def __init__(self, values: Values, handle: int, name: str) -> None:
        self.__dict__.update(_values=values, _handle=handle, __name__=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in its own process."""
        return self._values.ask("call", self._handle, args, kwargs)

    def __iter__(self) -> Any:
        return self._values.ask("iter", self._handle)

    def __next__(self) -> Any:
        return self._values.ask("next", self._handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._values.ask("attr", self._handle, (name,))

    def __repr__(self) -> str:
        return f"<{self.__name__} of the candidate>"


class Values:
    """Turns values into JSON and back at one end.

    `classes` has the classes that both ends define for themselves, by name.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self.classes: dict[str, type] = {}

    def encode(self, value: Any) -> Any:
        """Turn a value into JSON: plain data by content, anything else as a handle."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        tag = _BY_TYPE.get(kind)
        if tag in _CONTAINERS:
            return [tag, [self.encode(item) for item in value]]
        if tag in _MAPPINGS:
            return [tag, [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        if tag:
            return [tag, _TEXTUAL[tag][1](value)]
        for base in _BASES:
            if isinstance(value, base) and kind.__name__ not in self.classes:
                return self.encode(base(value))
        if kind is type and value in _TYPES:
            return ["T", value.__name__]
        if kind.__name__ in self.classes and hasattr(value, "__dict__"):
            return ["i", kind.__name__, [[k, self.encode(v)] for k, v in vars(value).items()]]
        if isinstance(value, Remote) and value._values is self:
            return ["m", value._handle]
        return ["H", self.add_object(value), str(getattr(value, "__name__", kind.__name__))]

    def decode(self, data: Any) -> Any:
        """Rebuild a value from built-in types, shared classes and handles."""
        if type(data) is not list:
            return data
        tag, content = data[0], data[1]
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([self.decode(item) for item in content])
        if tag in _MAPPINGS:
            pairs = [(self.decode(key), self.decode(value)) for key, value in content]
            return _MAPPINGS[tag](dict(pairs) if tag == "n" else pairs)
        if tag in _TEXTUAL:
            return _TEXTUAL[tag][2](content)
        if tag == "T":
            return next(kind for kind in _TYPES if kind.__name__ == content)
        if tag == "i":
            made = object.__new__(self.classes[content])
            made.__dict__.update({str(name): self.decode(value) for name, value in data[2]})
            return made
        if tag == "m":
            return self._objects[content]
        return Remote(self, int(content), str(data[2]))

    def add_object(self, value: Any) -> int:
        """Make an object available to the other end; returns its handle."""
        self._objects.append(value)
        return len(self._objects) - 1

    def encode_changed(self, value: Any, old: Any) -> Any:
        """Return an argument's new encoding if it differs from the old one, else None."""
        if type(value) in _SCALARS or isinstance(value, (Remote, tuple)):
            return None
        new = self.encode(value)
        return None if new == old or new[0] == "H" else new


def take_over(old: Any, new: Any) -> None:
    """Copy the candidate's changes of a mutable argument into the original."""
    if new is None or type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, collections.deque):
        old.clear()
        old.extend(new)
    elif hasattr(old, "__dict__"):
        old.__dict__.clear()
        old.__dict__.update(vars(new))


def rebuild_exception(record: Any, values: Values) -> Exception:
    """Rebuild an exception as the first class of its MRO that this process knows."""
    names, details = record
    arguments = [values.decode(value) for value in details]
    for name in names:
        kind = values.classes.get(name) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            with contextlib.suppress(Exception):
                return kind(*arguments)
    return CandidateError(names[0], *arguments)
