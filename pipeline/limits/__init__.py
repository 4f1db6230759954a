"""Limits on model calls, shared by all workers of a deployment.

Per endpoint and model, and per endpoint over all models: requests per minute, tokens per minute,
calls in flight. A pause for everybody when a model's calls are answered 429. `pool.py` is the way
in; a `Limiter` asks a ledger for all callers of its process at once, reserves slots a little ahead,
and each caller sleeps once.

What holds: no second sees more than limit + burst calls, runs share by weight while they contend,
a killed process's units return after its lease, and while Redis is away calls wait. What does not:
a process that was stopped beyond its lease and goes on may exceed the cap by what it holds, and a
second in which limits are changed may see calls of both.
"""
