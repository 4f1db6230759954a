"""The gateway: an HTTP server for the model calls of agents with a client of their own."""
