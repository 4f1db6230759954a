"""Limits on model calls, shared by all workers of a deployment through Redis.

Requests per minute, tokens per minute and calls in flight, per endpoint and model and per endpoint
over all models; and a pause of all workers when a model's calls are answered 429. `pool.py` is the
entry. One Lua script states the rules (`grant.lua` and the files it is joined with). A `Limiter`
syncs for all callers of its process at once and reserves slots a little ahead. Without Redis there
are no limits: `local_pause.py` pauses the calls of one process after 429s.

Guaranteed: no second sees more than limit + burst calls; runs share by weight while they contend;
the units of a killed process return after its lease; while Redis is away, limited calls wait. Not
guaranteed: a process that was stopped for longer than its lease may exceed the cap by the units it
holds, and a second in which limits are changed may see calls of both limits.
"""
