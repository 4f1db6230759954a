"""Alembic migrations of the trajectory store."""
