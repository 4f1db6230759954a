from __future__ import annotations

from typing import Any

import pytest

from workers.llm.token_capture import MISSING_LOGPROB, captured_tokens, policy_version


def content(*items: tuple[str, float | None]) -> dict[str, Any]:
    return {"content": [{"token": token, "logprob": logprob} for token, logprob in items]}


def test_vllm_gives_prompt_ids_on_top_and_token_ids_in_the_choice() -> None:
    choice = {"token_ids": [7, 8], "logprobs": content(("a", -1.0), ("b", -2.0))}
    tokens = captured_tokens({"prompt_token_ids": [1, 2]}, choice)
    assert tokens == ([1, 2], [7, 8], [-1.0, -2.0], "choice", None)


def test_sglang_gives_them_in_meta_info() -> None:
    meta = {
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, "b"]],
        "input_token_logprobs": [[None, 1, None], [-0.1, 2, None]],
    }
    tokens = captured_tokens({}, {"meta_info": meta})
    assert tokens == ([1, 2], [7, 8], [-1.0, -2.0], "meta_info", None)


def test_token_id_strings_are_the_last_place_looked_at() -> None:
    choice = {"logprobs": content(("token_id:7", -1.0), ("token_id:8", -2.0))}
    assert captured_tokens({}, choice).completion_token_ids == [7, 8]
    assert captured_tokens({}, {**choice, "token_ids": [5, 6]}).completion_token_ids == [5, 6]


def test_a_place_with_logprobs_goes_before_one_without_and_they_are_never_mixed() -> None:
    choice = {
        "token_ids": [5, 6],
        "meta_info": {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]]},
    }
    tokens = captured_tokens({}, choice)
    assert (tokens.completion_token_ids, tokens.logprobs) == ([7, 8], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"token_ids": [7], "logprobs": content(("a", -1.0), ("b", -2.0))}, "1 token ids but 2"),
        ({"token_ids": [7, "8"]}, "not all integers"),
        ({"token_ids": [True]}, "not all integers"),
        ({"token_ids": [7, False]}, "not all integers"),
        ({"token_ids": [7.0]}, "not all integers"),
        ({"token_ids": [-1]}, "between 0 and 2147483647"),
        ({"token_ids": [2**31]}, "between 0 and 2147483647"),
        ({"token_ids": [2**40]}, "between 0 and 2147483647"),
        ({"token_ids": "78"}, "not a list"),
        ({"meta_info": {"output_token_logprobs": [[-1.0], 5]}}, "not all integers"),
    ],
)
def test_what_does_not_fit_together_is_refused_whole(choice: dict[str, Any], says: str) -> None:
    tokens = captured_tokens({"prompt_token_ids": [1]}, choice)
    assert says in (tokens.refusal or "")
    assert tokens[:3] == (None, None, None)


@pytest.mark.parametrize("missing", [None, -9999.0, float("nan"), float("-inf"), -99999.0])
def test_a_missing_logprob_has_one_form(missing: float | None) -> None:
    choice = {"token_ids": [7, 8], "logprobs": content(("a", missing), ("b", -2.0))}
    assert captured_tokens({}, choice).logprobs == [MISSING_LOGPROB, -2.0]
    choice = {"token_ids": [7], "logprobs": content(("a", missing))}
    assert captured_tokens({}, choice).logprobs is None


def test_the_smallest_and_the_largest_ids_are_taken_as_they_are() -> None:
    choice = {"token_ids": [0, 1, 2**31 - 1]}
    assert captured_tokens({}, choice).completion_token_ids == [0, 1, 2**31 - 1]


def test_a_plain_server_gives_nothing() -> None:
    choice = {"message": {"content": "hi"}, "logprobs": content(("a", -1.0))}
    assert captured_tokens({}, choice) == (None, None, None, None, None)


@pytest.mark.parametrize(
    ("body", "choice", "headers", "version"),
    [
        ({"metadata": {"weight_version": "12"}}, {}, {"x-policy-version": "11"}, 12),
        ({}, {"meta_info": {"weight_version": 3}}, {}, 3),
        ({}, {}, {"x-policy-version": "11"}, 11),
        ({"metadata": {"weight_version": "default"}}, {}, {}, None),
        ({"metadata": None}, {}, {"x-policy-version": "v2"}, None),
    ],
)
def test_the_policy_version_is_read_where_servers_put_it(
    body: Any, choice: Any, headers: Any, version: int | None
) -> None:
    assert policy_version(body, choice, headers) == version
