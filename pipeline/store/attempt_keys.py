"""Keys of attempts as array parameters: `ids` and `nos`, which statements read with `unnest`.

Used by the modules of the store whose statements take several attempts. Must not: query.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.contract.messages import AttemptKey


def key_arrays(keys: Iterable[AttemptKey]) -> dict[str, Any]:
    """Return the parameters for these attempts, in their order."""
    keys = list(keys)
    return {"ids": [key[0] for key in keys], "nos": [key[1] for key in keys]}
