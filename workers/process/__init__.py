"""The worker process: Celery in front, one event loop behind it."""
