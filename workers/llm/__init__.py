"""Model clients: requests, retries, limits and the reading of answers."""
