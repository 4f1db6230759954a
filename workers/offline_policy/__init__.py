"""The offline policy: a server that stands in for a model, and is none."""
