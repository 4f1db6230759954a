"""A thing that the processes of a test run share is made once and ends with its last user."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fixtures.shared import shared


def test_a_shared_thing_is_made_by_its_first_user_and_ended_by_its_last(tmp_path: Path):
    done: list[str] = []

    def make() -> str:
        done.append("made")
        return f"thing {done.count('made')}"

    def use() -> ExitStack:
        user = ExitStack()
        assert user.enter_context(shared(tmp_path, make, done.append)) == "thing 1"
        return user

    first, second = use(), use()
    first.close()
    third = use()
    third.close()
    assert done == ["made"]
    second.close()
    assert done == ["made", "thing 1"]
    with shared(tmp_path, make, done.append) as again:
        assert again == "thing 2"
