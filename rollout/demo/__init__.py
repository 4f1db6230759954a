"""`rollout demo`: its command, and what it shows at the end."""
