"""Reading a request without decoding it."""

import json

import pytest

from benchmarks.mock_answers import (
    AnswerBook,
    asks_for_stream,
    count_turns,
    draw_key,
    read_identity,
    without_attempt,
)
from workers.llm.token_capture import captured_tokens


def body(*roles: str, text: str = "x", **fields: object) -> bytes:
    messages = [{"role": role, "content": text} for role in roles]
    return json.dumps({"messages": messages, **fields}).encode()


def decoded(response: bytes) -> dict:
    head, content = response.split(b"\r\n\r\n", 1)
    assert f"content-length: {len(content)}".encode() in head
    return json.loads(content)


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        (["system", "user"], 0),
        (["user", "assistant", "user"], 1),
        (["user", "assistant", "user", "assistant", "user"], 2),
        (["user", "assistant", "assistant", "user", "assistant", "assistant", "user"], 2),
        (["user", "assistant", "tool", "assistant", "tool"], 2),
    ],
)
def test_neighbouring_assistant_messages_are_one_turn(roles, turns):
    assert count_turns(body(*roles)) == turns


def test_the_word_assistant_inside_a_text_is_no_turn():
    assert count_turns(body("user", text='say "role":"assistant" and "assistant"')) == 0


def test_an_attempt_belongs_to_its_rollout():
    assert read_identity(body("user", user="math7-g000013-r3-a2")) == "math7-g000013-r3"
    assert without_attempt("math7-g000013-r3-a12") == "math7-g000013-r3"


def test_a_user_field_is_stronger_than_a_marker():
    assert read_identity(body("user", text="[row 4 sample 2]", user="run-g9-r1")) == "run-g9-r1"


def test_a_marker_in_the_prompt_names_the_rollout():
    assert read_identity(body("user", text="two [row 17 sample 3]")) == "g000017-r3"
    assert read_identity(body("user", text="two [row 17]")) == "g000017-r0"
    assert read_identity(body("user")) is None


def test_the_same_row_draws_the_same_fate_under_any_run():
    assert draw_key("b1-w2-g000017-r0") == draw_key("other-g000017-r0") == "g000017-r0"


def test_a_stream_is_seen_only_when_asked_for():
    assert asks_for_stream(body("user", stream=True))
    assert not asks_for_stream(body("user", stream=False))


def test_two_calculator_calls_come_before_the_final_answer():
    book = AnswerBook(turns=3)
    texts = [
        decoded(book.answer(turn, turn, body("user")))["choices"][0]["message"]["content"]
        for turn in range(4)
    ]
    assert ["calculator(expression='" in text for text in texts] == [True, True, False, False]
    assert texts[2].endswith("Final Answer: 400")
    assert texts[3] == texts[2]


def test_offered_tools_are_called_natively():
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    answer = decoded(AnswerBook(turns=3).answer(0, 1, body("user", tools=tools)))
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]["function"]
    assert call["name"] == "calculator"
    assert json.loads(call["arguments"]) == {"expression": "17 * 23"}


def test_an_empty_list_of_tools_is_answered_in_text():
    answer = decoded(AnswerBook(turns=3).answer(0, 1, body("user", tools=[])))
    assert "Action: calculator" in answer["choices"][0]["message"]["content"]


def test_each_prompt_continues_the_call_before_it_up_to_the_whole_context():
    book = AnswerBook(turns=5, context_tokens=103)
    whole: list[int] = []
    for turn in range(5):
        answer = decoded(book.answer(turn, turn, body("user")))
        found = captured_tokens(answer, answer["choices"][0])
        assert found.prompt_token_ids is not None
        assert found.completion_token_ids is not None
        assert found.logprobs is not None
        assert found.prompt_token_ids[: len(whole)] == whole
        assert len(found.logprobs) == len(found.completion_token_ids) == 10
        whole = found.prompt_token_ids + found.completion_token_ids
        assert ("Final Answer" in answer["choices"][0]["message"]["content"]) == (turn == 4)
    assert len(whole) == 103


def test_token_counts_add_up():
    usage = decoded(AnswerBook(turns=3).answer(0, 1, body("user")))["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
