"""Remote agents on AgentCore Runtime or in containers: their calls, their results, their sessions.

A worker invokes a session and ends its task (`data_plane.py`, `call_pace.py`). Two services of the
controller do the rest: `results.py` takes results from SQS and S3 into the store, `sessions.py`
stops sessions whose outcome is known.
"""
