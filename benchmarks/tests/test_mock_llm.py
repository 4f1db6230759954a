"""The mock server's counts and latencies, without a socket."""

import asyncio
import json
from time import monotonic
from typing import Any, cast

import pytest

from benchmarks.faults.histories import History, read_history
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_calls import MockLLM
from benchmarks.mock_llm import MockConnection


class Wire:
    """The transport of a connection: keeps what is written and tells when something is."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False
        self.news = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.news.set()

    def close(self) -> None:
        self.closed = True

    async def response(self) -> tuple[int, dict[str, Any]]:
        while not self.written:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 10)
        head, body = self.written.pop(0).split(b"\r\n\r\n", 1)
        return int(head.split(b" ")[1]), json.loads(body)


def request(rollout: str | None, turn: int = 0, *, headers: str = "") -> bytes:
    messages = [{"role": "user", "content": "What is 17 * 23?"}]
    for _ in range(turn):
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    fields: dict[str, Any] = {"model": "mock", "messages": messages}
    if rollout:
        fields["user"] = rollout
    return http("POST", "/v1/chat/completions", json.dumps(fields), headers)


def http(method: str, path: str, body: str = "", headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return (head + body).encode()


def connect(mock: MockLLM) -> tuple[MockConnection, Wire]:
    wire = Wire()
    connection = MockConnection(mock, asyncio.get_running_loop())
    connection.connection_made(cast(asyncio.Transport, wire))
    return connection, wire


async def ask(mock: MockLLM, data: bytes) -> tuple[int, dict[str, Any]]:
    connection, wire = connect(mock)
    connection.data_received(data)
    return await wire.response()


async def run_rollout(mock: MockLLM, rollout: str, turns: int = 3) -> None:
    for turn in range(turns):
        await ask(mock, request(rollout, turn))


async def test_a_finished_rollout_is_counted_once():
    mock = MockLLM(MockBehaviour())
    await run_rollout(mock, "w0-g000001-r0")
    summary = mock.ledger.summary(expected=2)
    assert summary["calls"] == summary["answered"] == 3
    assert summary["rollouts_finished"] == 1
    assert summary["rollouts_missing"] == 1
    assert summary["rollouts_repeated"] == 0


async def test_a_second_attempt_is_a_repetition_of_its_rollout():
    mock = MockLLM(MockBehaviour())
    await run_rollout(mock, "w0-g000001-r0-a1", turns=2)
    await run_rollout(mock, "w0-g000001-r0-a2")
    summary = mock.ledger.summary(expected=1)
    assert summary["rollouts_seen"] == summary["rollouts_finished"] == 1
    assert summary["rollouts_repeated"] == 1
    assert summary["calls_repeated"] == 2


async def test_a_rollout_without_final_answer_is_unfinished():
    mock = MockLLM(MockBehaviour())
    await run_rollout(mock, "w0-g000001-r0", turns=2)
    summary = mock.ledger.summary(expected=1)
    assert summary["rollouts_unfinished"] == summary["rollouts_missing"] == 1


async def test_a_retry_after_an_injected_error_is_no_repetition():
    mock = MockLLM(MockBehaviour(error_rate=0.9))
    statuses = []
    while 200 not in statuses:
        status, _ = await ask(mock, request("w2-g000001-r0"))
        statuses.append(status)
    summary = mock.ledger.summary()
    assert summary["answered"] == 1
    assert sum(summary["errors"].values()) == len(statuses) - 1 > 0
    assert summary["calls_repeated"] == 0


async def test_a_rate_limit_says_when_to_come_back():
    mock = MockLLM(MockBehaviour(error_rate=0.9, retry_after_s=2))
    assert b"\r\nretry-after: 2\r\n" in mock.errors[429]


async def test_a_header_names_the_rollout():
    mock = MockLLM(MockBehaviour())
    await ask(mock, request(None, headers="X-Rollout-Id: w0-g000001-r0-a1\r\n"))
    await ask(mock, request("w0-g000001-r0"))
    assert mock.ledger.summary()["rollouts_seen"] == 1


async def test_a_call_without_name_is_counted_as_anonymous():
    mock = MockLLM(MockBehaviour())
    await ask(mock, request(None))
    summary = mock.ledger.summary()
    assert (summary["calls"], summary["anonymous"], summary["rollouts_seen"]) == (1, 1, 0)


async def test_calls_wait_side_by_side_for_their_latency():
    mock = MockLLM(MockBehaviour(latency_ms=50))
    started = monotonic()
    await asyncio.gather(*(ask(mock, request(f"w1-g{n:06d}-r0")) for n in range(200)))
    elapsed_s = monotonic() - started
    assert elapsed_s >= 0.049
    assert elapsed_s < 200 * 0.05  # one after the other
    assert mock.ledger.peak_in_flight == 200
    assert mock.ledger.in_flight == 0


async def test_a_client_that_leaves_is_no_answer_and_no_longer_in_flight():
    mock = MockLLM(MockBehaviour(latency_ms=60_000))
    connection, wire = connect(mock)
    connection.data_received(request("w1-g000001-r0"))
    assert mock.ledger.in_flight == 1
    connection.connection_lost(None)
    summary = mock.ledger.summary()
    assert (summary["in_flight"], summary["abandoned"], summary["answered"]) == (0, 1, 0)
    assert wire.written == []


async def test_a_request_in_pieces_is_one_request():
    mock = MockLLM(MockBehaviour())
    connection, wire = connect(mock)
    for byte in request("w0-g000001-r0"):
        connection.data_received(bytes([byte]))
    status, _ = await wire.response()
    assert (status, mock.ledger.calls) == (200, 1)


async def test_pipelined_requests_are_answered_in_order():
    mock = MockLLM(MockBehaviour(latency_ms=1))
    connection, wire = connect(mock)
    connection.data_received(request("w0-g000001-r0", 0) + request("w0-g000001-r0", 2))
    texts = [(await wire.response())[1]["choices"][0]["message"]["content"] for _ in range(2)]
    assert "Action: " in texts[0]
    assert "Final Answer: " in texts[1]


async def test_reset_starts_a_new_count_and_lets_old_calls_end_in_the_old_one():
    mock = MockLLM(MockBehaviour(latency_ms=5))
    connection, wire = connect(mock)
    connection.data_received(request("w1-g000001-r0"))
    status, _ = await ask(mock, http("POST", "/reset", '{"latency_ms": 0}'))
    assert status == 200
    await wire.response()
    _, stats = await ask(mock, http("GET", "/stats?expected=7"))
    assert (stats["calls"], stats["in_flight"], stats["rollouts_missing"]) == (0, 0, 7)
    assert stats["behaviour"]["latency_ms"] == 0


async def test_a_disturbed_mock_refuses_calls_for_as_long_as_it_was_told():
    mock = MockLLM(MockBehaviour())
    disturb = '{"rate_limited_s": 60, "rate_limited_share": 1.0}'
    assert (await ask(mock, http("POST", "/disturb", disturb)))[0] == 200
    assert (await ask(mock, request("w1-g000001-r0")))[0] == 429
    await ask(mock, http("POST", "/disturb", "{}"))
    assert (await ask(mock, request("w1-g000001-r0")))[0] == 200


async def test_a_silent_call_is_open_until_its_client_leaves_and_noted_as_unanswered(tmp_path):
    mock = MockLLM(MockBehaviour(), History(tmp_path, "model"))
    await ask(mock, http("POST", "/disturb", '{"silent_share": 1.0}'))
    connection, wire = connect(mock)
    connection.data_received(request("w1-g000001-r0"))
    assert (wire.written, mock.ledger.in_flight) == ([], 1)
    connection.connection_lost(None)
    await ask(mock, http("POST", "/disturb", "{}"))
    await ask(mock, request("w1-g000001-r0"))
    notes = read_history(tmp_path, "model")
    assert [(note["rollout"], note["status"]) for note in notes] == [
        ("w1-g000001-r0", 0),
        ("w1-g000001-r0", 200),
    ]
    assert notes[1]["tokens"] > 0


async def test_reset_to_nonsense_changes_nothing():
    mock = MockLLM(MockBehaviour(latency_ms=5))
    status, answer = await ask(mock, http("POST", "/reset", '{"latency": 3}'))
    assert status == 400
    assert "latency_ms" in answer["error"]["message"]
    assert mock.behaviour.latency_ms == 5


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (http("POST", "/v1/chat/completions", '{"messages": [], "stream": true}'), 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /" + b"x" * 70_000, 431),
    ],
)
async def test_what_the_mock_does_not_serve_is_refused_and_not_counted(data, status):
    mock = MockLLM(MockBehaviour())
    connection, wire = connect(mock)
    connection.data_received(data)
    assert (await wire.response())[0] == status
    assert wire.closed
    assert mock.ledger.calls == 0


async def test_other_paths_are_not_found():
    mock = MockLLM(MockBehaviour())
    assert (await ask(mock, http("GET", "/v1/models")))[0] == 200
    assert (await ask(mock, http("GET", "/nowhere")))[0] == 404
