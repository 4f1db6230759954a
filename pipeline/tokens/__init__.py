"""Recorded tokens: packing, merging into segments, rows and padding; pure functions."""
