"""Built-in agents."""
