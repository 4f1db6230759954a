"""The longest names that the store keeps: each becomes part of a key or of an index.

Used by the messages, the run's configuration, producers, rewards and the trainer client. Postgres
rejects index entries above 2,704 bytes, and a character takes up to four. Must not: check
more than the length.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

#: Longest name of a reward, an agent, a dataset, a consumer, a worker.
NAME_CHARS = 200
#: Longest `reward.part`.
PART_NAME_CHARS = 2 * NAME_CHARS + 1

Name = Annotated[str, Field(max_length=NAME_CHARS)]
PartName = Annotated[str, Field(max_length=PART_NAME_CHARS)]


def check_name(name: str, owner: str) -> str:
    """Return the name if it is short enough to be stored.

    Args:
        name: The name.
        owner: The noun that the name belongs to, for the error.

    Raises:
        ValueError: It is too long.
    """
    if len(name) > NAME_CHARS:
        raise ValueError(
            f"The {owner} named {name[:40]!r}... has a name of {len(name)} characters; at most "
            f"{NAME_CHARS} are stored."
        )
    return name
