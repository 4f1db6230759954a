"""The agent library's core: trajectories, agents, tools and their registries."""
