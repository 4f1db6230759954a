"""Fault injection: a separate deployment, the faults, and the checks of the invariants.

`tests/faults` runs the short form; `python -m benchmarks faults` (`benchmarks.faults.campaign`) the
long one. Must not: be imported by the product, or touch a process that it did not start.
"""
