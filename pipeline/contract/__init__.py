"""Pure values shared by every process: states, messages, errors; stdlib and pydantic only."""
