"""The command line; the composition root that wires producers, pipeline and workers."""
