"""Measures the calls that three processes get under one limit of requests, then of tokens.

`python -m benchmarks limits` runs it. The demand of all callers exceeds the limit. Must not print.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.limit_fleet import Fleet, PrivateRedis, Report
from benchmarks.report import Figure
from pipeline.embedded.redis_programs import find_program
from pipeline.limits.store import LimitStore

_PROCESSES = 3
_CALLERS = 40
_HOLD_S = 0.02
#: Time left out at both ends, while processes start and stop.
_EDGE_S = 0.5

_REQUESTS_PER_S, _REQUEST_BURST = 200, 40
_TOKENS_PER_S, _TOKEN_BURST = 20_000, 2_000
_TOKENS_OF_A_CALL = (50, 100, 200)


async def measure_limits(*, seconds: float) -> list[Figure]:
    """Let the processes call for `seconds` under each kind of limit.

    Raises:
        ServiceUnavailable: No Redis program is installed.
    """
    # A short path, because socket paths are limited to about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="lim") as folder:
        server = PrivateRedis(find_program(), Path(folder))
        server.start()
        try:
            return await _requests(server, seconds) + await _tokens(server, seconds)
        finally:
            server.kill()


async def _requests(server: PrivateRedis, seconds: float) -> list[Figure]:
    limits = {"requests_per_minute": 60 * _REQUESTS_PER_S, "burst": _REQUEST_BURST}
    report, since, until = await _run(server, "requests", limits, [0] * _PROCESSES, seconds)
    granted = report.between(since, until) / (until - since)
    most = report.most_in_a_second()
    return _figures("requests", granted, most, _REQUESTS_PER_S, _REQUEST_BURST, report)


async def _tokens(server: PrivateRedis, seconds: float) -> list[Figure]:
    limits = {"tokens_per_minute": 60 * _TOKENS_PER_S, "token_burst": _TOKEN_BURST}
    report, since, until = await _run(server, "tokens", limits, list(_TOKENS_OF_A_CALL), seconds)
    granted = report.tokens_between(since, until) / (until - since)
    most = report.most_in_a_second(tokens=True)
    return _figures("tokens", granted, most, _TOKENS_PER_S, _TOKEN_BURST, report)


async def _run(
    server: PrivateRedis, prefix: str, limits: dict[str, int], tokens: list[int], seconds: float
) -> tuple[Report, float, float]:
    """Let the processes call; return their calls, and the window in which all of them ran."""
    fleet = Fleet(server.url, prefix, LimitStore.connect(server.url, prefix=prefix))
    try:
        await fleet.limit(**limits)
        runs = [
            [{"run": f"r{number}", "callers": _CALLERS, "tokens": size, "hold_s": _HOLD_S}]
            for number, size in enumerate(tokens)
        ]
        await fleet.start(*runs, seconds=seconds)
        return await fleet.report(), fleet.since + _EDGE_S, fleet.until - _EDGE_S
    finally:
        await fleet.store.close()


def _figures(
    unit: str, granted: float, most: int, limit: int, burst: int, report: Report
) -> list[Figure]:
    share, note = granted / limit, f"{granted:.0f}/s of {limit}/s, {_PROCESSES} processes"
    cost = report.calls / len(report.grants)
    return [
        Figure("", f"{unit} granted / limit, at least", share, "", 0.95, None, False, note),
        Figure("", f"{unit} granted / limit, at most", share, "", 1.0, None, True, note),
        Figure("", f"most {unit} in any second", most, "", limit + burst, None, True),
        Figure("", f"Redis calls per grant ({unit})", cost, "", 1.2, None, True),
    ]
