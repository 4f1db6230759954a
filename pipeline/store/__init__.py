"""The Postgres trajectory store: the truth about every rollout."""
