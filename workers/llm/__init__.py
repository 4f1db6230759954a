"""Model clients and the offline policy."""
