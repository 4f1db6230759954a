"""Batches of trainers of the verl family."""
