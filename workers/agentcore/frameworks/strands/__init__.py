"""Strands Agents: the app that makes its models, and the hook that collects its turns."""
