"""The gateway: the model behind HTTP, for agents that bring a client of their own."""
