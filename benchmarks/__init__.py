"""The cost of the pipeline compared with a bare loop: workloads, baselines, mock LLM, reports.

Run by `make bench`, which is `python -m benchmarks`; not part of the wheel. Nothing in the product
imports this package, and no timing here is a test.
"""
