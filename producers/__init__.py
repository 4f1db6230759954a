"""Producers: read datasets and enqueue their prompts as groups and rollouts."""
