"""Faults on purpose: a deployment of its own, what is done to it, and the proof of what is kept.

`tests/faults` runs the short form; `python -m benchmarks faults` (`benchmarks.faults.campaign`) the
long one. Must not: be imported by the product, or touch a process that it did not start.
"""
