"""Datasets in, prompts, groups and rollouts out."""
