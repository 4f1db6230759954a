"""The demo: its servers, its run, and its summary."""
