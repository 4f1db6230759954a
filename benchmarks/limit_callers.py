"""One process of a fleet: callers that call as fast as the limits allow.

`limit_fleet.py` runs it with orders as JSON and writes the start time to stdin once all processes
are up. The output has the time of each call, in the machine's monotonic clock, and the number of
calls of Redis.
"""

import asyncio
import json
import random
import sys
import time

from pipeline.limits.limiter import Limiter
from pipeline.limits.pool import LimiterPool

ENDPOINT, MODEL = "http://127.0.0.1:9/v1", "m"


async def call(limiter: Limiter, orders: dict, run: dict, grants: list) -> None:
    """Repeat: wait for a lease, hold it for a while, pause."""
    while time.monotonic() < orders["until"]:
        lease = await limiter.acquire(
            run=run["run"], weight=run.get("weight", 1.0), estimated_tokens=run.get("tokens", 0)
        )
        granted_at = time.monotonic()
        await asyncio.sleep(run.get("hold_s", 0.0))
        grants.append([granted_at, time.monotonic(), run["run"], run.get("tokens", 0)])
        lease.settle(run.get("tokens", 0))
        if think_s := run.get("think_s", 0.0):
            await asyncio.sleep(random.expovariate(1 / think_s))


async def main(orders: dict) -> None:
    pool = LimiterPool(orders["url"], prefix=orders["prefix"], lease_s=orders["lease_s"])
    limiter = pool.limiter(ENDPOINT, MODEL)
    grants: list = []
    print("ready", flush=True)
    orders |= json.loads(await asyncio.to_thread(sys.stdin.readline))
    await asyncio.sleep(max(0.0, orders["since"] - time.monotonic()))
    async with asyncio.TaskGroup() as group:
        for run in orders["runs"]:
            for _ in range(run["callers"]):
                group.create_task(call(limiter, orders, run, grants))
        if orders.get("note_at"):
            await asyncio.sleep(max(0.0, orders["note_at"] - time.monotonic()))
            limiter.pause(orders["retry_after_s"])
    calls = limiter.shared.calls
    await pool.close()
    print(json.dumps({"grants": grants, "calls": calls}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
