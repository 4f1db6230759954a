"""The broker side: Celery application, requests, completions, payload claim checks."""
