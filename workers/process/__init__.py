"""The worker process: Celery takes requests, one event loop executes them."""
