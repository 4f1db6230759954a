"""Sandboxes, in which untrusted commands run."""
