from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.sandbox.capture import BoundedCapture


def test_short_output_is_kept_as_it_is() -> None:
    capture = BoundedCapture(10)
    capture.add("äöü".encode())
    assert capture.text() == "äöü"
    assert capture.dropped == 0


def test_long_output_keeps_head_and_tail_and_says_what_is_cut() -> None:
    capture = BoundedCapture(8)
    for _ in range(1000):
        capture.add(b"0123456789")
    assert capture.dropped == 10_000 - 8
    assert capture.text() == "0123\n[... 9992 bytes of output cut ...]\n6789"


@given(chunks=st.lists(st.binary(max_size=40), max_size=40), limit=st.integers(1, 64))
def test_kept_and_dropped_add_up_whatever_the_chunks(chunks: list[bytes], limit: int) -> None:
    capture = BoundedCapture(limit)
    for chunk in chunks:
        capture.add(chunk)
    whole = b"".join(chunks)
    assert capture.total == len(whole)
    assert capture.dropped == max(0, len(whole) - limit)
    if len(whole) <= limit:
        assert capture.text() == whole.decode(errors="replace")
