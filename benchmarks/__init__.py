"""What the pipeline costs beside a bare loop: workloads, baselines, mock LLM, meters, reports.

Run by `rollout bench`, `make bench` and `python -m benchmarks`. Nothing in the product imports
this package, and no timing here is a test.
"""
