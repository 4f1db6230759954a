"""Agents, tools, rewards and the worker process that runs them."""
