"""Reward functions and their registry."""
