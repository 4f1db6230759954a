"""Where untrusted commands run."""
