"""Recorded tokens as `rollout show rollout --tokens` prints them."""

from __future__ import annotations

import json

import pytest
from fixtures.sampled_calls import sampled, without_ids

from pipeline.tokens.segments import Segments, merge_calls
from rollout.output import print_json
from rollout.segment_tables import print_segments, segments_document


@pytest.fixture
def merged() -> Segments:
    return merge_calls(
        [
            sampled(0, [1, 2, 3], [10, 11], [-0.05, -9999.0], version=4),
            sampled(1, [1, 2, 3, 10, 11, 4], [12], [-2.5], version=5, finish_reason="length"),
            sampled(2, [7], [13], agent="critic"),
            without_ids(3),
        ]
    )


def test_each_trained_token_has_a_line_with_mask_logprob_and_version(capsys, merged):
    print_segments(merged)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert [" ".join(line.split()) for line in shown.splitlines()] == [
        "segment 0 (start): 7 tokens, 3 sampled in calls 0, 1, truncated",
        "position id mask logprob version",
        "0-2 0 3 tokens of context",
        "3 10 1 -0.0500 4",
        "4 11 1 – 4",
        "5 0 1 token of context",
        "6 12 1 -2.5000 5",
        "segment 1 (start): 2 tokens, 1 sampled in call 2, agent critic",
        "position id mask logprob version",
        "0 0 1 token of context",
        "1 13 1 -0.0127 –",
        "1 call without ids.",
    ]


def test_a_terminal_gets_colours_by_probability(capsys, monkeypatch, merged):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_segments(merged)
    by_id = {
        parts[1]: line
        for line in capsys.readouterr().out.splitlines()
        if len(parts := line.split()) == 5
    }
    assert by_id["10"].startswith("\x1b[32m")  # likely: green
    assert by_id["12"].startswith("\x1b[31m")  # unlikely: red
    assert by_id["11"].startswith("\x1b[35m")  # the server gave no logprob


def test_the_document_is_json_in_which_an_unknown_logprob_is_null(capsys, merged):
    print_json(segments_document(merged))
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    first = document["segments"][0]
    assert first["token_ids"] == [1, 2, 3, 10, 11, 4, 12]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0, 1]
    assert first["logprobs"][4] is None
    assert first["versions"] == [-1, -1, -1, 4, 4, -1, 5]
    assert (document["calls_without_ids"], document["calls_untrained"]) == (1, 0)


def test_a_rollout_without_ids_says_so(capsys):
    print_segments(merge_calls([without_ids(0)]))
    assert capsys.readouterr().out.splitlines() == [
        "No token ids are stored.",
        "1 call without ids.",
    ]
